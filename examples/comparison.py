"""One workload decoded in the ways the table compares."""

from dataclasses import dataclass

from engine.batch import Request
from engine.decode import Generation
from transformers_baseline import BaselineGeneration


@dataclass(frozen=True)
class Workload:
    """Requests that are decoded together, all at one temperature: the batch size is their number."""

    name: str
    labels: list[str]
    requests: list[Request]

    @property
    def temperature(self) -> float:
        return self.requests[0].temperature


@dataclass
class Comparison:
    workload: Workload
    drafter_name: str
    num_drafts: int
    plain: Generation
    speculative: Generation
    transformers: BaselineGeneration | None

    @property
    def identical(self) -> list[bool] | None:
        """Per request: is the speculative output the plain one? Only greedy outputs must agree; sampled
        ones agree in law, not token by token."""
        if self.workload.temperature > 0:
            return None
        pairs = zip(self.speculative.output_ids, self.plain.output_ids, strict=True)
        return [ours == plain for ours, plain in pairs]

    @property
    def speedup_over_plain(self) -> float:
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    @property
    def speedup_over_transformers(self) -> float | None:
        speed = self.transformers and self.transformers.tokens_per_second
        return self.speculative.tokens_per_second / speed if speed else None


def merge(name: str, comparisons: list[Comparison]) -> Comparison:
    """Workloads run one after the other, as one row of the table: tokens, time and rounds add up."""
    first = comparisons[0]
    workload = Workload(
        name,
        [label for c in comparisons for label in c.workload.labels],
        [request for c in comparisons for request in c.workload.requests],
    )
    baselines = [c.transformers for c in comparisons]
    return Comparison(
        workload,
        first.drafter_name,
        first.num_drafts,
        sum_generations([c.plain for c in comparisons]),
        sum_generations([c.speculative for c in comparisons]),
        None if None in baselines else sum_baselines(baselines),
    )


def sum_generations(parts: list[Generation]) -> Generation:
    return Generation(
        output_ids=[ids for part in parts for ids in part.output_ids],
        prefill_seconds=sum(part.prefill_seconds for part in parts),
        decode_seconds=sum(part.decode_seconds for part in parts),
        rounds=sum(part.rounds for part in parts),
        request_passes=sum(part.request_passes for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        status=[bits for part in parts for bits in part.status],
    )


def sum_baselines(parts: list[BaselineGeneration]) -> BaselineGeneration:
    return BaselineGeneration(
        output_ids=[ids for part in parts for ids in part.output_ids],
        decode_seconds=sum(part.decode_seconds for part in parts),
        decoded_tokens=sum(part.decoded_tokens for part in parts),
    )
