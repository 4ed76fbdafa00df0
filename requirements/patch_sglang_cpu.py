"""Patches the installed SGLang, so that it starts on a machine without a GPU, and fast.

Run it with the python of SGLang's environment:

    .sglang/bin/python requirements/patch_sglang_cpu.py

Two things break there. An imported torchvision describes CUDA operators that its library does not have.
SGLang's rotary embedding asks for vLLM's kernel, which the CPU never calls.

Each of a server's three processes also imports everything anew, because CUDA cannot be forked. Without CUDA
they are forked.

Only the exact text of the versions below is changed. Any other version or text is refused by name. A second
run changes nothing.
"""

import os
import sys
from importlib import metadata

VERSIONS = {"sglang": "0.5.23", "torchvision": "0.28.0"}
# Package, file, what stands there (once), what is put in its place.
PATCHES = (
    (
        "torchvision",
        "torchvision/_meta_registrations.py",
        '\n@torch.library.register_fake("torchvision::nms")\n',
        '\n# no CUDA: @torch.library.register_fake("torchvision::nms")\n',
    ),
    (
        "torchvision",
        "torchvision/_meta_registrations.py",
        '\n@torch.library.register_fake("torchvision::qnms")\n',
        '\n# no CUDA: @torch.library.register_fake("torchvision::qnms")\n',
    ),
    (
        "sglang",
        "sglang/srt/layers/rotary_embedding/base.py",
        "\n                from vllm._custom_ops import rotary_embedding\n",
        "\n                rotary_embedding = None"
        "  # no CUDA: from vllm._custom_ops import rotary_embedding\n",
    ),
    (
        "sglang",
        "sglang/srt/entrypoints/engine.py",
        '\n    mp.set_start_method("spawn", force=True)\n',
        '\n    mp.set_start_method("fork", force=True)  # no CUDA: "spawn"\n',
    ),
)


def patch(versions=VERSIONS, patches=PATCHES) -> list[str]:
    """Applies `patches` to the packages on sys.path and returns the files that it changed.

    ValueError, before anything is changed, names the package whose version or text is another.
    """
    remedy = "Install requirements/sglang-cpu.txt (make sglang-cpu) or adapt this script."
    for package, wanted in versions.items():
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise ValueError(f"{package} is not installed for {sys.executable}. {remedy}") from None
        if found != wanted and not found.startswith(wanted + "+"):  # 0.28.0+cpu is 0.28.0
            raise ValueError(f"{package} is {found}, but the CPU patches are for {wanted}. {remedy}")
    texts: dict[str, str] = {}
    before: dict[str, str] = {}
    for package, file, old, new in patches:
        path = str(metadata.distribution(package).locate_file(file))
        if path not in texts:
            if not os.path.isfile(path):
                raise ValueError(f"{package} {versions[package]} has no file {file}. {remedy}")
            with open(path, encoding="utf-8", newline="") as stream:
                texts[path] = before[path] = stream.read()
        counts = texts[path].count(old), texts[path].count(new)
        if counts == (0, 1):  # patched before
            continue
        if counts != (1, 0):
            raise ValueError(
                f"{file} of {package} {versions[package]} has {old.strip()!r} {counts[0]} times "
                f"instead of once. {remedy}"
            )
        texts[path] = texts[path].replace(old, new)
    changed = [path for path, text in texts.items() if text != before[path]]
    for path in changed:
        temporary = path + ".new"  # a link to pip's cache, if it is one, is replaced and not written through
        with open(temporary, "w", encoding="utf-8", newline="") as stream:
            stream.write(texts[path])
        os.replace(temporary, path)
    return changed


def main() -> None:
    try:
        changed = patch()
    except ValueError as error:
        sys.exit(f"Error: {error}")
    print("\n".join(f"patched {path}" for path in changed) or "already patched")


if __name__ == "__main__":
    main()
