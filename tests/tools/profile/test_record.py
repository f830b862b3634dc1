import pickle
import pickletools

import pytest
import torch
from torch.cuda import _memory_viz

from lowtide.memory import cpu_allocations
from lowtide.tools.profile.record import as_snapshot, recording, save
from lowtide.tools.profile.timeline import Timeline, timeline

MIB = 2**20
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]

# The opcodes of pickle protocols 2 to 4 that the viewer's reader knows (unpickle in
# torch/utils/viz/MemoryViz.js).
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE1"),
    *("TUPLE2", "TUPLE3", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE"),
    "BINUNICODE",
}


def block(mebibytes, device="cpu"):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device=device)


@pytest.fixture(params=DEVICES)
def record(request):
    """1 MiB before; then 2, 4 without the 2, 3 that stays."""
    device = request.param
    before = block(1, device)
    with recording(device) as record:
        first = block(2, device)
        second = block(4, device)
        del first
        third = block(3, device)
        del second
    assert (before.nbytes, third.nbytes) == (MIB, 3 * MIB)
    return record


def test_levels_over_time(record):
    line = timeline(record.snapshot)
    before = line.bytes[0]
    assert [(each - before) / MIB for each in line.bytes] == [0, 2, 6, 4, 7, 3]
    assert before >= (MIB if record.snapshot.get("allocator_settings") else 0)  # on CUDA it is known
    assert line.ms[0] == 0
    assert line.ms == sorted(line.ms)
    assert line.peak == before + 7 * MIB


def test_snapshot_read_by_viewer(record, tmp_path):
    path = tmp_path / "deeper" / "memory.pickle"
    save(record.snapshot, path)
    content = path.read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= OPCODES
    assert content[:2] == b"\x80\x04"
    snapshot = pickle.loads(content)
    assert snapshot["device_traces"] == record.snapshot["device_traces"]
    # The readers of torch/cuda/_memory_viz.py, each of which goes through other fields.
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Active Cached Memory Timeline" in _memory_viz.trace_plot(snapshot, plot_segments=True)
    text = _memory_viz.trace(snapshot)
    assert "3.0MiB" in text
    assert _memory_viz.segsum(snapshot)
    assert str(3 * MIB) in _memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)


def test_frames_on_the_cpu_are_operators():
    logits = torch.rand(64, 512, requires_grad=True)
    with recording("cpu") as record:
        torch.nn.functional.cross_entropy(logits, torch.zeros(64, dtype=torch.int64)).backward()
    (trace,) = record.snapshot["device_traces"]
    names = {frame["name"] for event in trace for frame in event["frames"]}
    assert {"aten::log_softmax", "LogSoftmaxBackward0"} <= names
    largest = max((each for each in trace if each["action"] == "alloc"), key=lambda each: each["size"])
    assert largest["size"] == logits.nbytes
    assert largest["frames"][-1]["name"].startswith(("aten::", "autograd::"))


def test_events_with_segments():
    """The viewer looks for the segment of each block that it draws."""
    with cpu_allocations() as allocations:
        kept = [block(1), block(2).clone()]
        del kept[0]
    snapshot = as_snapshot(allocations)
    actions = [event["action"] for event in snapshot["device_traces"][0]]
    assert actions.count("segment_alloc") == actions.count("alloc") == 3
    assert actions.count("segment_free") == actions.count("free_requested") == 2
    assert actions.count("free_completed") == 2
    (segment,) = snapshot["segments"]
    assert segment["total_size"] == segment["blocks"][0]["size"] == 2 * MIB == kept[0].nbytes


def test_exception_keeps_record():
    def fail():
        block(2)
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"), recording("cpu") as record:
        fail()
    assert timeline(record.snapshot).peak == 2 * MIB


def test_thinning_takes_linear_time():
    """It took the square of its length, two minutes for 100 small steps, and seemed to hang."""

    class Levels(list):
        looks = 0

        def __iter__(self):
            Levels.looks += 1
            return super().__iter__()

    levels = Levels((place * 7919) % 1000 for place in range(1000))
    thin = Timeline([float(place) for place in range(1000)], levels).thinned()
    assert thin.peak == 999
    assert Levels.looks == 1


def test_thinning_keeps_peak_and_ends():
    levels = [0, 5, 5000, 5001, 5000, 3000, 3002, 10]
    thin = Timeline(list(map(float, range(8))), levels).thinned()
    assert thin.peak == 5001
    assert (thin.bytes[0], thin.bytes[-1]) == (0, 10)
    assert 3000 in thin.bytes
    assert 3002 not in thin.bytes
    assert timeline({"device_traces": [[]], "segments": []}).thinned() == Timeline([], [])
