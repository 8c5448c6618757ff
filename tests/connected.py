"""A task with secrets. Nothing else may name them here: a run keeps a copy of the file of its task."""

from dataclasses import dataclass

from tests.tasks import Plain


@dataclass
class Connected(Plain):
    """Has secrets as defaults of its fields: neither command line nor environment holds them."""

    db_password: str = "tr0ub4dor&3"
    hf_token: str = "hf_abcdefghijklmnop"
    openaiApiKey: str = "sk-0123456789abcdef"
    url: str = "mysql+pymysql://me:p@ss/w0rd9@host/db?token=qwertyuiop"
