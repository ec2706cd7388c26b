"""Benchmarks that count: correctness first, then contenders side by side.

    bench = Harness(device="cpu", threads=[1, 2])
    bench.case(
        "sample", "V=151936 fp32",
        inputs=rows,                       # rotated, so that caches do not hold the next one
        ours=lambda row: ...,
        peers={"torch softmax + multinomial": lambda row: ...},
        bytes=4 * 151936,                  # what must be read and written at least
        flops=0,                           # multiplications and additions that cannot be avoided
        check=lambda: ...,                 # raises when the result is wrong: no time without it
        target=50.0,                       # ratio to the best peer that is aimed at, or None
    )
    bench.write("benchmarks/results")      # cpu.json and cpu.md; cases of other ops stay

Contenders are called in turn, in changing order, `repeats` times; each turn is long enough to time.
A ratio is the median over the turns of peer / ours, so that a machine that slows down for a while
slows both. There are two floors, from peaks measured in the same run at the same number of threads:
`bytes` over the memory bandwidth (the faster of a sum and a copy), and `flops` over what torch's float32
matrix product reaches (on a GPU: of `dtype`). No number here comes from another run or machine.

A case runs cold: its inputs are rotated through more memory than the caches hold, and the bandwidth is
that of a buffer which no cache holds. With warm=True it runs a second time on its first input alone, as
rows that the layer before has just written, against the bandwidth of a buffer of `bytes`.
"""

import json
import os
import pathlib
import platform
import statistics
import time

import torch

import specdec_ext

_TURN = 0.004  # seconds that one turn of a contender takes at least


def _cpu_name():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


class Harness:
    def __init__(self, device="cpu", threads=(1, 2), repeats=15):
        self.device, self.repeats = torch.device(device), repeats
        self.threads = list(threads) if self.device.type == "cpu" else [torch.get_num_threads()]
        self.rows = []
        self._bandwidth, self._peak = {}, {}

    # --- Measuring ------------------------------------------------------------------------------
    def _sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _seconds(self, fn, calls, inputs, start):
        self._sync()
        begin = time.perf_counter()
        for i in range(calls):
            fn(inputs[(start + i) % len(inputs)])
        self._sync()
        return (time.perf_counter() - begin) / calls

    def bandwidth(self, threads, size=1 << 28):
        """(read, copy) in bytes per second of a buffer of `size` bytes: larger than any cache."""
        if (threads, size) not in self._bandwidth:
            x = torch.ones(max(size // 4, 1), device=self.device)
            y = torch.empty_like(x)
            once, calls = [None], max(1, (1 << 24) // size)
            read = [self._seconds(lambda _: x.sum(), calls, once, 0) for _ in range(7)]
            copy = [self._seconds(lambda _: y.copy_(x), calls, once, 0) for _ in range(7)]
            self._bandwidth[threads, size] = (x.nbytes / min(read), 2 * x.nbytes / min(copy))
        return self._bandwidth[threads, size]

    def peak_flops(self, threads, dtype):
        """Floating point operations per second of a large matrix product. CPU kernels compute in float32."""
        dtype = torch.float32 if self.device.type == "cpu" else dtype
        if (threads, dtype) not in self._peak:
            n = 1024 if self.device.type == "cpu" else 8192
            x = torch.randn(n, n, device=self.device).to(dtype)
            seconds = [self._seconds(lambda _: torch.mm(x, x), 1, [None], 0) for _ in range(9)]
            self._peak[threads, dtype] = 2 * n**3 / min(seconds)
        return self._peak[threads, dtype]

    def case(
        self,
        op,
        name,
        *,
        ours,
        peers,
        bytes,
        check,
        inputs=(None,),
        target=None,
        flops=0,
        dtype=torch.float32,
        warm=False,
    ):
        """Checks, then measures at every number of threads, and prints a line each."""
        check()
        contenders = {"ours": ours, **peers}
        work = {"bytes": bytes, "flops": flops, "dtype": dtype, "target": target}
        self._measure(op, name, contenders, inputs, **work)
        if warm:
            self._measure(op, name + ", warm", contenders, inputs[:1], **work, size=int(bytes))

    def _measure(self, op, name, contenders, inputs, *, bytes, flops, dtype, target, size=1 << 28):
        peers = [key for key in contenders if key != "ours"]
        for threads in self.threads:
            if self.device.type == "cpu":
                torch.set_num_threads(threads)
            read, copy = self.bandwidth(threads, size)
            peak = self.peak_flops(threads, dtype) if flops else None
            calls = {}
            for key, fn in contenders.items():
                self._seconds(fn, 1, inputs, 0)
                calls[key] = max(1, int(_TURN / self._seconds(fn, 2, inputs, 1)))
            times = {key: [] for key in contenders}
            at = 0
            for turn in range(self.repeats):
                keys = list(contenders)
                for key in keys if turn % 2 == 0 else reversed(keys):
                    times[key].append(self._seconds(contenders[key], calls[key], inputs, at))
                    at += calls[key]
            row = {
                "op": op,
                "case": name,
                "threads": threads,
                "us": statistics.median(times["ours"]) * 1e6,
                "us_best": min(times["ours"]) * 1e6,
                "us_worst": max(times["ours"]) * 1e6,
                "floor_us": bytes / max(read, copy) * 1e6,
                "flop_floor_us": flops / peak * 1e6 if flops else None,
                "read_gb_per_s": read / 1e9,
                "copy_gb_per_s": copy / 1e9,
                "peak_gflops": peak / 1e9 if flops else None,
                "peers": {
                    key: {
                        "us": statistics.median(times[key]) * 1e6,
                        "ratio": statistics.median(
                            b / a for a, b in zip(times["ours"], times[key], strict=True)
                        ),
                    }
                    for key in peers
                },
                "target": target,
            }
            self.rows.append(row)
            print(_line(row), flush=True)

    # --- Writing --------------------------------------------------------------------------------
    def machine(self):
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else _cpu_name()
        return {
            "device": name,
            "cpu_isa": specdec_ext.cpu_isa(),
            "load": round(os.getloadavg()[0], 1),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "specdec_ext": specdec_ext.__version__,
        }

    def write(self, folder):
        """<folder>/<device>.json, and .md beside it. Earlier rows of ops that ran now are replaced."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.device.type}.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        ran = {row["op"] for row in self.rows}
        rows = [row for row in rows if row["op"] not in ran] + self.rows
        rows.sort(key=lambda row: row["op"])
        text = json.dumps({"machine": self.machine(), "rows": rows}, indent=1)
        path.write_text(text + "\n")
        path.with_suffix(".md").write_text(markdown(self.machine(), rows))
        return path


def _line(row):
    peers = "  ".join(f"{p['ratio']:.1f}x {key}" for key, p in row["peers"].items())
    return (
        f"{row['op']:18} {row['case']:34} {row['threads']}t {row['us']:9.1f} us "
        f"({row['us_best']:.1f}..{row['us_worst']:.1f}), floor {_floors(row)} us   {peers}"
        + (f"   [aim {row['target']:.0f}x]" if row["target"] else "")
    )


def _floors(row):
    flops = row.get("flop_floor_us")
    return f"{row['floor_us']:.1f}" + (f", arithmetic {flops:.1f}" if flops else "")


def markdown(machine, rows):
    """The table of a results file."""
    lines = [
        "Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + ".",
        "",
        "| op | case | threads | µs (best..worst) | floor µs | against | aim |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        peers = "; ".join(f"{p['ratio']:.1f} x {key}" for key, p in row["peers"].items())
        aim = f"{row['target']:.0f} x" if row["target"] else ""
        lines.append(
            f"| `{row['op']}` | {row['case']} | {row['threads']} | {row['us']:.1f} "
            f"({row['us_best']:.1f}..{row['us_worst']:.1f}) | {_floors(row)} | {peers} | {aim} |"
        )
    return "\n".join(lines) + "\n"
