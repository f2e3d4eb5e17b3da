"""Our HTTP server over a Triton with scripted responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Event
from types import MappingProxyType
from typing import Any

import httpx
import openai
from app_server import serving
from chat_templates import QWEN
from scripted_server import PATIENCE_S
from scripted_triton import Answer, Part, ScriptedTriton, event, to_error
from small_tokenizers import byte_level

from cog_triton.engines.base import Abilities, EngineLimits
from cog_triton.engines.openvino import guides as openvino_guides
from cog_triton.errors import CogTritonError
from cog_triton.serving.adapter_store import AdapterStore
from cog_triton.serving.admission import Admission
from cog_triton.serving.generate import TextGenerator
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.openai.parsers.borrowed import BorrowedParsers
from cog_triton.serving.openai.routes import OpenAIRoutes
from cog_triton.serving.openai.served_applications import create_app
from cog_triton.serving.openai.served_models import ServedAPI, ServedModels
from cog_triton.serving.openai.stored_responses import RunningResponses
from cog_triton.serving.telemetry.metrics import Metrics
from cog_triton.serving.telemetry.platform_metrics import LoRARequests
from cog_triton.settings import load_settings
from cog_triton.system.ports import bind
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.infer_stream import TokenTransport

TOKENIZER = EngineTokenizer(
    byte_level(), chat_template=QWEN, bos_token="<|im_start|>", eos_token="<|im_end|>"
)
USER = [{"role": "user", "content": "Hi"}]


Ended = tuple[GenerationRequest, GenerationResult, BaseException | None]


def tokens(*texts: str, **values: Any) -> list[Part]:
    return [event(output_ids=TOKENIZER.encode(text), **values) for text in texts]


@dataclass
class Served:
    url: str
    triton: ScriptedTriton
    metrics: Metrics
    admission: Admission
    ended: list[Ended] = field(default_factory=list)
    failure: CogTritonError | None = None
    clients: ExitStack = field(default_factory=ExitStack)

    def client(self, **options: Any) -> openai.OpenAI:
        values = {"api_key": "none", "max_retries": 0, **options}
        return self.clients.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", **values))

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return httpx.post(f"{self.url}{path}", timeout=PATIENCE_S, **options)

    def ask(self, path: str, **fields: Any) -> Any:
        """The JSON of an answer with status 200."""
        answer = self.post(f"/v1/{path}", {"model": "small", **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **fields: Any) -> list[Any]:
        """The events of a stream, without the one that ends it."""
        answer = self.post(f"/v1/{path}", {"model": "small", "stream": True, **fields})
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def refusal(self, path: str, **fields: Any) -> dict[str, Any]:
        """The error of an answer with status 400, which no engine has seen."""
        before = len(self.triton.requests)
        answer = self.post(f"/v1/{path}", {"model": "small", **fields})
        assert answer.status_code == 400, answer.text
        assert len(self.triton.requests) == before
        return dict(answer.json()["error"])

    @property
    def sent(self) -> dict[str, Any]:
        """Input values of the last request that reached the engine."""
        return self.triton.requests[-1].values

    @property
    def prompt(self) -> str:
        """The text of that request's prompt."""
        ids = self.sent["input_ids"]
        return str(TOKENIZER.tokenizer.decode(ids, skip_special_tokens=False))

    def require_ready(self) -> None:
        if self.failure is not None:
            raise self.failure


class RecordingMetrics(Metrics):
    """Metrics that also keep every ended generation with its error."""

    def __init__(self) -> None:
        super().__init__()
        self.generations: list[Ended] = []

    def ended(
        self, request: GenerationRequest, result: GenerationResult, error: BaseException | None
    ) -> None:
        super().ended(request, result, error)
        self.generations.append((request, result, error))


@contextmanager
def api(
    answer: Answer,
    *,
    slots: int = 4,
    queue: float = 8,
    guides: bool = False,
    abilities: Abilities | None = None,
    transport: TokenTransport | None = None,
    adapters: AdapterStore | None = None,
    tokenizer: EngineTokenizer = TOKENIZER,
    defaults: Mapping[str, float] = MappingProxyType({}),
    borrowed: BorrowedParsers | None = None,
    store: RunningResponses | None = None,
    context: int = 1000,
    **options: Any,
) -> Iterator[Served]:
    if abilities is None:
        abilities = Abilities(
            guides={"json_schema"} if guides else frozenset(), check_guide=openvino_guides.check
        )
    settings = load_settings(served_model_name="small", **options)
    limits = EngineLimits(
        max_input_len=context - 100,
        max_seq_len=context,
        max_batch_size=slots,
        end_id=None,
        pad_id=None,
    )
    metrics, admission = RecordingMetrics(), Admission(slots, queue)
    with ScriptedTriton(answer) as triton:
        stack = ExitStack()
        transport = transport or stack.enter_context(triton.connected())
        generator = TextGenerator(
            settings, limits, tokenizer, transport, to_error, admission, observer=metrics
        )
        metrics.registry.register(LoRARequests(2, generator.adapter_use))
        listening = bind("OPENAI_PORT", "127.0.0.1", 0, 64)
        served = Served(
            f"http://127.0.0.1:{listening.getsockname()[1]}", triton, metrics, admission
        )
        served.ended = metrics.generations
        models = ServedModels("small", adapters)
        app = create_app(
            OpenAIRoutes(
                ServedAPI(settings, generator, models, abilities, defaults, borrowed, store)
            ).routes(),
            require_ready=served.require_ready,
            on_refused=metrics.refused,
        )
        with stack, serving(app, listening, settings), served.clients:
            yield served


def wait(condition: Any) -> Any:
    deadline = Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if value := condition():
            return value
        deadline.wait(0.01)
    return condition()


THREE = tokens("the ", "quick ", "größer")
