"""The settings of a client. A section of the config that asks a model has them all (client.py)."""

DEFAULTS = {
    "base_url": "http://127.0.0.1:30000/v1",  # of the server: SGLang's own, or a hosted one's
    "model": "default",  # the server's name of it; "default": the one that it serves
    "key_variable": "OPENAI_API_KEY",  # environment variable with the key; unset: the server needs none
    "temperature": 0.7,
    "max_tokens": 1024,  # of an answer
    "json_schema": True,  # the server constrains answers to a schema; False: we only check them
    "timeout": 60.0,  # seconds for one whole answer
    "attempts": 4,  # at one answer, if the server cannot be reached, is slow, busy or broken
    "patience": 30.0,  # seconds between two attempts at most, whatever the server asks for
    "concurrency": 16,  # questions at once
    "max_bytes": 1_000_000,  # of an answer
    "price_in": 0.0,  # money per million tokens of questions
    "price_out": 0.0,  # money per million tokens of answers
    "budget_tokens": 0,  # in and out; beyond it no question is asked; 0: no bound
    "budget_money": 0.0,  # likewise
    "cache": "runs/answers.sqlite",  # keeps every answer, for all runs that ask the same; "": no cache
    "offline": False,  # True: take answers from the cache alone
}
