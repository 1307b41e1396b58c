"""`onchip serve`: from options to a running server."""

import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from onchip.core.extras import require
from onchip.core.hub_cache import is_model_id
from onchip.engine.engine import Engine
from onchip.engine.llm import LLM
from onchip.engine.ranks import check_divisible
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.stats import EngineStats
from onchip.engine.step import Limits
from onchip.models import Model, about, builtin, resolve

from .api_keys import ENVIRONMENT, Keyring, read_keys
from .app import Server, ServerOptions
from .process import Address, ServerProcess, raise_file_limit, url_of

LOG = logging.getLogger("onchip.serve")
LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
BUILTIN_PAGES = 2049  # for the built-in model, 112 MiB; the live page draws all but the null page


def serve(args: SimpleNamespace) -> int:
    """Run until SIGTERM, or until SIGINT, which raises KeyboardInterrupt once the server has ended.
    Options are checked before the model loads.
    """
    logging.basicConfig(format=LOG_FORMAT)
    logging.getLogger("onchip").setLevel(args.log_level.upper())  # other packages log warnings only
    address = Address(args.host, args.port)
    keys = _keyring(args, address)
    options = make_options(args, address, keys)
    speculation = SpeculativeConfig.parse_json(args.speculative_config)
    if args.tensor_parallel_size > 1:
        check_tensor_parallel(args, speculation)
    if args.replicas > 1:
        require("onchip serve --replicas", "ray", "ray")
    sock = address.bind()
    raise_file_limit()
    if args.replicas > 1:
        return _serve_replicas(args, options, keys, sock)
    if args.tensor_parallel_size > 1:
        return _serve_ranks(args, options, keys, sock)
    server = make_server(args, options, keys)
    process = ServerProcess(server, args.drain_s, make_announcement(args, options, keys, sock))
    process.run([sock])
    if server.service.death_cause:
        return 1
    if process.was_interrupted:
        raise KeyboardInterrupt(summarise(server.service.stats))
    return 0


def make_server(args: SimpleNamespace, options: ServerOptions, keys: Keyring) -> Server:
    """Load the model and put a server in front of its engine."""
    engine = load_engine(args)
    LOG.info("%s", describe(engine, options.model))
    return Server(engine, add_model_type(options, engine.model), keys)


def load_engine(args: SimpleNamespace) -> Engine:
    engine = _model(args, SpeculativeConfig.parse_json(args.speculative_config)).engine
    if args.model not in builtin.NAMES:  # a vocabulary of 257 tokens needs no preparation
        engine.warm_up_grammars()
    return engine


def add_model_type(options: ServerOptions, model: Model) -> ServerOptions:
    return replace(options, model_type=getattr(model.config, "model_type", ""))


def make_announcement(
    args: SimpleNamespace, options: ServerOptions, keys: Keyring, sock: socket.socket
) -> Callable[[], None]:
    """Prints the address of a server that listens."""
    return lambda: _announce(options.model, keys, url_of(sock), args.model)


def _serve_ranks(
    args: SimpleNamespace, options: ServerOptions, keys: Keyring, sock: socket.socket
) -> int:
    os.environ.pop(ENVIRONMENT, None)  # rank 0 gets the keyring, the other ranks need no keys
    from .tensor_parallel import serve_ranks  # torch.distributed is slow to import

    return serve_ranks(args, options, keys, sock)


def _serve_replicas(
    args: SimpleNamespace, options: ServerOptions, keys: Keyring, sock: socket.socket
) -> int:
    os.environ.pop(ENVIRONMENT, None)  # the processes of Ray inherit the environment
    from .replicas.cluster import Cluster  # starts Ray's own threads
    from .replicas.gateway import Gateway

    options = replace(
        options,
        max_open=options.max_open * args.replicas,
        max_bodies_bytes=options.max_bodies_bytes * args.replicas,
    )
    port = sock.getsockname()[1]  # the option may be 0
    with Cluster({**vars(args), "port": port}) as replicas:
        announce = make_announcement(args, options, keys, sock)
        process = ServerProcess(Gateway(replicas, options, keys), args.drain_s, announce)
        process.run([sock])
    if process.was_interrupted:
        raise KeyboardInterrupt("the replicas have ended")
    return 0


def check_tensor_parallel(args: SimpleNamespace, speculation: SpeculativeConfig | None) -> None:
    """ValueError: these options are not served by several ranks. No weights are read."""
    size = args.tensor_parallel_size
    with_size = f"is not served with tensor_parallel_size={size}"
    if args.replicas > 1:
        raise ValueError(f"replicas={args.replicas} {with_size}: each replica is one process")
    if args.kv_offloading_size:
        raise ValueError(f"kv_offloading_size={args.kv_offloading_size:g} {with_size}")
    if speculation is not None and speculation.model is not None:
        raise ValueError(f'a draft model {with_size}: method "ngram" is')
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if str(device) not in ("cpu", "cuda"):
        raise ValueError(f"device={device} {with_size}: each rank has its own, give cpu or cuda")
    if str(device) == "cuda" and torch.cuda.device_count() < size:
        count = torch.cuda.device_count()
        raise ValueError(f"tensor_parallel_size={size} needs {size} GPUs, {count} are here")
    check_divisible(resolve(args.model), size)


def _keyring(args: SimpleNamespace, address: Address) -> Keyring:
    keys, warnings = read_keys(args.api_key_file)
    if args.api_key:
        keys.append(args.api_key)
        warnings.append("--api-key is visible to all users of this machine: use a file")
    keyring = Keyring(keys)
    if keyring.is_open and not address.is_local:
        warnings.append(f"every client that reaches {address.host} may use it: there are no keys")
    for warning in warnings:
        print(f"onchip: warning: {warning}", file=sys.stderr)
    return keyring


def _model(args: SimpleNamespace, speculation: SpeculativeConfig | None) -> LLM:
    tiny = args.model in builtin.NAMES
    if tiny:
        torch.set_num_threads(1)  # its matrices are too small for several threads
    return LLM(
        args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        max_model_len=args.max_model_len,
        block_size=args.page_size,
        num_pages=args.pages or (BUILTIN_PAGES if tiny else None),
        swap_space=args.swap_gib,
        kv_offloading_size=args.kv_offloading_size,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        seed=args.seed,
        device=args.device,
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=not args.no_prefix_caching,
        disable_cascade_attn=args.disable_cascade_attn,
        prefill_precision=args.prefill_precision,
        fused_decode=args.fused_decode,
        fused_experts=args.fused_experts,
        speculative_config=speculation,
        reproducible=args.reproducible,
    )


def make_options(args: SimpleNamespace, address: Address, keys: Keyring) -> ServerOptions:
    for name in ("max_queue", "drain_s"):
        if not getattr(args, name) >= 0:
            raise ValueError(f"{name}={getattr(args, name)} must not be negative")
    if args.max_queue > Limits.max_queued_requests:
        most = Limits.max_queued_requests
        raise ValueError(f"max_queue={args.max_queue} exceeds {most}, the engine's queue limit")
    return ServerOptions(
        model=args.name or _served_name(args.model),
        max_body_bytes=int(args.max_body_mib * 2**20),
        max_bodies_bytes=int(args.max_bodies_mib * 2**20),
        max_request_s=args.max_request_s,
        max_stall_s=args.max_stall_s,
        max_open=args.max_num_seqs + args.max_queue,
        hosts=address.hosts if keys.is_open else None,
        tool_call_parser=args.tool_call_parser,
    )


def _served_name(model: str) -> str:
    """A folder's own name. A Hub id is a name that clients know."""
    is_folder = Path(model).exists() or not is_model_id(model)
    return Path(model).resolve().name if is_folder else model


def describe(engine: Engine, name: str) -> str:
    """The served model: device, dtype, pages, memory."""
    model, pool, spec = engine.model, engine.cache.pool, engine.cache.spec
    words = [
        f"model={name} device={model.device} dtype={_word(model.dtype)}",
        f"kv_dtype={_word(spec.kv_dtype or spec.dtype)} pages={pool.capacity}",
        f"page_tokens={spec.page_size} max_model_len={engine.limits.max_model_len}",
        f"pages_mib={pool.capacity * spec.page_bytes / 2**20:.0f}",
    ]
    if model.device.type == "cuda":
        words.append(f"device_mib={torch.cuda.memory_reserved(model.device) / 2**20:.0f}")
    return " ".join(words)


def summarise(stats: EngineStats) -> str:
    drafts = f" ({stats.speculation})" if stats.speculation else ""
    return f"{stats.tokens_generated} tokens were generated{drafts}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _announce(name: str, keys: Keyring, url: str, model: str) -> None:
    if note := about(model):
        print(note)
    kind = "no key needed" if keys.is_open else "with keys"
    print(f"{name} on {url}/v1, live page {url}/ ({kind})", flush=True)
