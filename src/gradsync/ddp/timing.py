"""When things happened in the last iterations: a few clock readings a step, averaged on demand."""

from __future__ import annotations

from time import perf_counter_ns

__all__ = ["Timing"]


class Timing:
    """Clock readings of one iteration, and sums over all."""

    def __init__(self) -> None:
        self.iterations = 0
        self.forward_start = 0
        self.backward_start = 0
        self.first_launch = 0
        self.backward_end = 0
        self.comm_end = 0
        self._sums = [0, 0, 0, 0]

    def note_forward(self) -> None:
        """Note the beginning of a forward."""
        self.forward_start = perf_counter_ns()

    def note_backward(self) -> None:
        """Note the beginning of a backward."""
        self.backward_start = perf_counter_ns()
        self.first_launch = 0

    def note_launch(self) -> None:
        """Note that a bucket was launched."""
        if not self.first_launch:
            self.first_launch = perf_counter_ns()

    def note_computed(self) -> None:
        """Note that this rank's gradients are complete."""
        self.backward_end = perf_counter_ns()

    def note_done(self) -> None:
        """Note that the gradients are the mean."""
        self.comm_end = perf_counter_ns()
        self.iterations += 1
        for place, value in enumerate(self._durations()):
            self._sums[place] += value

    def _durations(self) -> tuple[int, int, int, int]:
        launched = self.first_launch or self.backward_end
        return (
            max(0, self.backward_start - self.forward_start),
            self.backward_end - self.backward_start,
            self.comm_end - launched,
            max(0, self.backward_end - launched),
        )

    def figures(self) -> dict[str, int]:
        """Return the last iteration's times and the averages, in nanoseconds."""
        if not self.iterations:
            return {}
        names = (
            "forward_compute_time",
            "backward_compute_time",
            "backward_comm_time",
            "backward_compute_comm_overlap_time",
        )
        found = dict(zip(names, self._durations(), strict=True))
        for name, total in zip(names, self._sums, strict=True):
            found[f"avg_{name}"] = total // self.iterations
        found["forward_compute_time_start"] = self.forward_start
        found["backward_compute_time_start"] = self.backward_start
        found["backward_comm_time_start"] = self.first_launch or self.backward_end
        found["backward_compute_time_end"] = self.backward_end
        found["backward_comm_time_end"] = self.comm_end
        return found
