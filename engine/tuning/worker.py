"""``python -m engine.tuning.worker``: the process of one trial. The parent (``engine.tuning.apart``) writes one pickled order to its standard
input and keeps that open; the answer goes into a file. It ends at once when the parent has gone."""

import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

from engine.tuning.trial import TrialFailed

ERROR_CHARS = 500


def main() -> None:
    order = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = list(dict.fromkeys([*sys.path, *order["path"]]))
    answer: Any
    try:
        task = pickle.loads(order["task"])
        answer = task.run(task)
    except TrialFailed as error:
        answer = str(error)
    except (Exception, SystemExit) as error:  # whatever an engine or a drafter does: it is this trial's end, told in the answer
        answer = f"{type(error).__name__}: {error}"
    where = Path(order["answer"])
    part = where.with_suffix(".part")
    part.write_bytes(pickle.dumps(answer if not isinstance(answer, str) else answer[:ERROR_CHARS]))
    part.replace(where)
    sys.stdout.flush()
    os._exit(0)  # no waiting for threads that an engine may have left


def _end_with_parent() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
