"""Commits of nanochat whose constants the weights do not determine. No torch.

Models with value gates of 32 columns (G2, G2s) were trained with a soft cap of 15 or 20, and with rotary tables in
bfloat16 or float32. Files that record nanochat's commit settle both. Source: the constants in nanochat/gpt.py at each
commit of master.
"""

from __future__ import annotations

from collections.abc import Mapping

_CAP_15 = (
    "00a562c 012da1a 02baa15 0307997 067daa7 07c4dd4 0a23f87 0c4ce36 0f3b6a4 0fe9acb 1144d18 124f49b 1415fb7 "
    "16b8ac7 1ddaad1 1ec0a34 212bdae 230d6cf 240a60f 2c062aa 2dffdc8 2e17723 2f09686 31b61d2 345935c 348fbb3 "
    "3b95d4f 3ba42e8 3c3a3d7 413e91a 41bb2ea 43078c3 433aacf 4585551 4800c62 48804bf 4a6e47b 4d6415b 4d8dbaf "
    "535f664 542beb0 5fdd5cd 6079f78 63bb583 64a651a 65df0de 685271d 6a341f2 6a477ee 6e9ef8f 718e5e9 72b9064 "
    "74554be 75b302f 77f8fb8 788dade 8180e1d 83dccc2 85b3e95 8630d32 8b4849d 8ebc14b 9652279 98eed6d 998b8f8 "
    "a54691b a67eba3 a91743c ace6740 ad55575 aeff095 b19b4f3 babde18 bac5a35 bb51378 c7ba252 cac43e8 cf5c9e5 "
    "d489a1f d510b13 d63b7ab d6c4f3b d9678ff dc291c6 e527521 e569b59 e7ed208 e85db6b e8fec97 eaf49a3 ebd4d9b "
    "f41dd3c f5fe792 fe55b09 ff46300"
)
"""Soft cap 15, tables in bfloat16: G2."""
_CAP_20_ROUNDED = "324e69c 4b40774 752abc8 aba30cb b07604e"  # soft cap 20, tables in bfloat16
_CAP_20 = "1052d25 1076f97 28894e1 d96558b f2899a1 f8ff043"  # soft cap 20, tables in the computation's precision: G2s
_KNOWN: tuple[tuple[str, Mapping[str, str]], ...] = (
    (_CAP_15, {"generation": "G2"}),
    (_CAP_20_ROUNDED, {"generation": "G2s", "rope_dtype": "bfloat16"}),
    (_CAP_20, {"generation": "G2s"}),
)


def constants_at(commit: str | None) -> Mapping[str, str]:
    """Return the constants of value gates with 32 columns at a commit; empty for other commits and None."""
    if commit is None or len(commit) < 7:
        return {}
    return next((constants for commits, constants in _KNOWN if commit[:7] in commits.split()), {})
