"""Which combinations of parameters a test takes: few that cover all values, or all in `tests.campaigns.products`."""

import itertools
import os

ALL = "TFLOOP_TESTS_ALL"
"""The variable that has tests take all combinations."""


def pairs(*values):
    """Combinations in which each two values of two parameters come together; each argument is one parameter's values.

    Mistakes mostly need one value, or two together.
    """
    return _covering(2, values)


def singles(*values):
    """Combinations in which each value comes."""
    return _covering(1, values)


def _covering(together, values):
    """The combination that has most of what is missing, and so on, until nothing is."""
    all_of_them = [*itertools.product(*values)]
    if ALL in os.environ:
        return all_of_them

    def parts(combination):
        return {*itertools.combinations(enumerate(map(repr, combination)), together)}

    missing = set().union(*map(parts, all_of_them))
    chosen = []
    while missing:
        best = max(all_of_them, key=lambda combination: len(missing & parts(combination)))
        chosen.append(best)
        missing -= parts(best)
    return chosen
