"""Whether lower or higher values of a metric are better, by its name: the only rule by which values are ranked."""

from __future__ import annotations

import re

from callbacks.arguments import check

_LESS = re.compile(r"loss|error|perplexity|cross_?entropy|divergence|distance|neg(ative)?_?log_?likelihood")
_MORE = re.compile(r"accuracy|precision|recall|reward|similarity|likelihood|correct|score")
_LESS_WORDS = re.compile(
    "mae|mse|msd|rmse|rmsd|rmsle|msle|mape|smape|wape|mase|nrmse|logcosh|cosh|hinge|poisson|brier|crps|ece|mce|eer|kl|"
    "kld|js|jsd|emd|nll|ce|bce|cce|nce|ppl|bpc|bpb|bpd|wer|cer|mer|ter|der|fid|kid|fvd|lpips|err|cost|energy|regret|"
    "false|fpr|fnr|far|frr|latency|seconds"
)
_MORE_WORDS = re.compile(
    "acc|auc|auroc|roc|auprc|aupr|prauc|f1|f2|fbeta|r2|rsquared|bleu|rouge|rougel|meteor|chrf|cider|spice|iou|miou|giou|"
    "jaccard|dice|map|ap|ndcg|mrr|hit|hits|top|em|psnr|ssim|kappa|mcc|corr|correlation|pearson|spearman|sensitivity|"
    "specificity|true|tpr|tnr|ppv|npv|elbo|gain|wins|winrate|throughput"
)


def lower_is_better(metric: str) -> bool | None:
    """Whether lower values of a metric of this name are better; None if the name doesn't say."""
    name = metric.lower().replace("io_u", "iou")  # as Keras writes it
    words = re.findall(r"[a-z][a-z0-9]*", name)
    words += [word.rstrip("0123456789") for word in words]  # bleu4, map50
    # Lower first: `neg_log_likelihood` ends in `likelihood`, of which a higher value is better.
    if _LESS.search(name) or any(map(_LESS_WORDS.fullmatch, words)):
        return True
    if _MORE.search(name) or any(map(_MORE_WORDS.fullmatch, words)):
        return False
    return None


def sign(callback: object, argument: str, metric: str, mode: str) -> int:
    """1 if lower values of the metric are better, else -1; with the mode `"auto"`, by its name.

    Raises:
        ValueError: of the callback and its argument: there is no such mode, or the name doesn't say what is better.
    """
    check(callback, mode in ("auto", "min", "max"), "give auto, min or max", mode=mode)
    lower = lower_is_better(metric) if mode == "auto" else mode == "min"
    fix = "the name doesn't say what is better: check it, or give mode"
    check(callback, lower is not None, fix, **{argument: metric})
    return 1 if lower else -1
