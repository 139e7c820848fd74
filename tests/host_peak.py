"""The peak of what a call allocates on the host, as torch's profiler counts it."""

from torch.profiler import ProfilerActivity, profile


def host_peak(act):
    """(most bytes at once, bytes left) of all that torch allocates on the host while act() runs,
    beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        act()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live
