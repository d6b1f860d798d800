"""Compare the replies of this tree with the golden ones, or write them anew."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.goldens.cases import DIALECTS
from tests.goldens.replies import REPLIES, differences, replies_of
from tests.goldens.servers import served

parser = argparse.ArgumentParser(prog="python -m tests.goldens", description=__doc__)
parser.add_argument("--rewrite", action="store_true", help="write replies/*.json anew")
options = parser.parse_args()
lines: list[str] = []
with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as urls:
    for dialect in DIALECTS:
        file, found = REPLIES / f"{dialect}.json", replies_of(dialect, urls, Path(folder))
        if options.rewrite:
            file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        else:
            lines += [f"{dialect}{line}" for line in differences(json.loads(file.read_text()), found)]
print("\n".join(lines) or f"{sum(map(len, DIALECTS.values()))} requests, no difference")
sys.exit(bool(lines))
