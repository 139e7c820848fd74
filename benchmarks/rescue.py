"""What benchmarks/step.py does when a rival spoils the whole process: it leaves the GPUs unusable,
or never comes back. The run then goes on in a new process, without that rival in that contest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence

from measure import keep
from rivals import Devices, wait

TICK_S = 0.5
LOOK_S = 30.0


def end_children() -> None:
    """DDP's processes, which may be in the middle of anything."""
    for child in multiprocessing.active_children():
        child.kill()


class Rescue:
    """`found` is the run so far, which the next process takes up from `path`, or from a file that
    is made then: `found["lost"]` names rivals and why they are left out. `arguments`: those of the
    script, without --resume. `ends_at`: by the monotonic clock."""

    def __init__(
        self,
        found: Dict[str, Any],
        arguments: Sequence[str],
        devices: Devices,
        path: str,
        ends_at: float,
    ) -> None:
        self._ends_at = ends_at
        self._found = found
        self._arguments = list(arguments)
        self._devices = devices
        self._path = path
        self._lock = threading.Lock()
        self._watched: Optional[List[Any]] = None
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def attend(self, contest: str, rival: str, patience_s: float) -> Iterator[None]:
        """Around what a rival does in this process."""
        with self._lock:
            self._watched = [time.monotonic() + patience_s, contest, rival, patience_s]
        try:
            yield
        finally:
            with self._lock:
                self._watched = None

    def look_after(self, contest: str, rival: str, reason: str) -> None:
        """Of a rival that has failed: returns if the process can go on without it."""
        try:
            with self.attend(contest, rival, LOOK_S):
                wait(self._devices)
        except RuntimeError:
            self.lose(contest, rival, reason)

    def lose(self, contest: str, rival: str, reason: str) -> None:
        """Does not return."""
        self._found["lost"].append({"contest": contest, "rival": rival, "reason": reason})
        path = self._path or tempfile.mkstemp(".json", "step-")[1]
        keep(path, self._found)
        print(f"{contest}: {rival} spoiled the process ({reason}); going on without it", flush=True)
        end_children()
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "step.py")
        left_s = max(1.0, self._ends_at - time.monotonic())
        again = [*self._arguments, "--limit", f"{left_s:.0f}", "--resume", path]
        os.execv(sys.executable, [sys.executable, script, *again])

    def _watch(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self._lock:
                watched = self._watched
                if watched is not None and time.monotonic() > watched[0]:
                    _, contest, rival, patience_s = watched
                    faulthandler.dump_traceback()
                    self.lose(contest, rival, f"no answer in {patience_s:.0f} s")
