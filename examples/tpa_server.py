"""A server in miniature: many requests decoded together, from one pool of pages.

`python examples/tpa_server.py` serves requests that arrive one after the other to the model of
`tpa_decoder.py`. Prompts that begin alike share the pages of what they share. A prompt is read in
chunks, between steps that write one token of every other request; whoever finishes frees its pages
and its place. In the end each request is decoded alone, from a cache of its own, and must come to
the same tokens and logits, to the bit.
"""

import collections
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import Progress

from tpa_decoder import Cache, Model

CHUNK = 16  # tokens of a prompt that are read at once
PAGE = 8  # tokens; a chunk has whole pages
MOST_PAGES = 9  # of a request
IDLE = -1  # the length of a place that nobody has: nothing is written there


@nnx.jit(donate_argnames="caches")
def read(
    model: Model,
    tokens: jax.Array,
    caches: list[Cache],
    lengths: jax.Array,
    table: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, list[Cache]]:
    """The likeliest token [B] after tokens [B, N], and its logit.

    Compiled twice: for a chunk of one prompt, and for a token of every place.
    """
    logits, caches = model(tokens, caches, lengths, table)
    return logits[:, -1].argmax(axis=-1), logits[:, -1].max(axis=-1), caches


@dataclasses.dataclass
class Request:
    """`tokens` are the prompt and what was written so far; `length` of them are in the cache."""

    prompt: tuple[int, ...]
    num_new: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logits: list[float] = dataclasses.field(default_factory=list)
    length: int = 0
    place: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def reads_chunks(self) -> bool:
        return len(self.prompt) - self.length >= CHUNK

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.num_new

    def advance(self, n: int, after: int, logit: float) -> None:
        """Counts n more cached tokens. If all known tokens are cached now, `after` comes next."""
        self.length += n
        if self.length == len(self.tokens):
            self.tokens.append(after)
            self.logits.append(logit)


class Server:
    """Places for requests, and pages for what they have read and written."""

    def __init__(self, model: Model, *, places: int, pages: int) -> None:
        self.model, self.caches = model, model.empty_cache(pages, PAGE, jnp.bfloat16)
        self.running: list[Request | None] = [None] * places
        self.waiting: collections.deque[Request] = collections.deque()
        self.table = np.full((places, MOST_PAGES), -1, np.int32)
        self.free = list(range(pages))
        self.users: collections.Counter[int] = collections.Counter()  # of each page
        self.known: dict[tuple[int, ...], list[int]] = {}  # pages of prompts' first chunks

    def admit(self) -> None:
        """Gives waiting requests a place, as long as there are places and pages."""
        while self.waiting and None in self.running:
            request = self.waiting[0]
            shared = self._shared(request.prompt)
            count = -(-(len(request.prompt) + request.num_new) // PAGE) - len(shared)
            if count > len(self.free):
                return
            self.waiting.popleft()
            request.pages = shared + [self.free.pop() for _ in range(count)]
            self.users.update(request.pages)
            request.tokens, request.length = list(request.prompt), len(shared) * PAGE
            request.place = self.running.index(None)
            self.running[request.place] = request
            self.table[request.place, : len(request.pages)] = request.pages

    def _shared(self, prompt: tuple[int, ...]) -> list[int]:
        """Pages that have the prompt's first chunks already; its last token is always read."""
        ends = (len(prompt) - 1) // CHUNK * CHUNK
        known = (self.known.get(prompt[:end], []) for end in range(ends, 0, -CHUNK))
        return next(filter(None, known), [])

    def step(self) -> list[Request]:
        """One chunk of each new prompt, and one token of every other request; who finished."""
        running = [request for request in self.running if request is not None]
        for request in running:
            if request.reads_chunks:
                now = request.tokens[request.length : request.length + CHUNK]
                self._read([now], [request.length], slice(request.place, request.place + 1), CHUNK)
        writing = [request for request in running if not request.reads_chunks]
        tokens, lengths = [[0]] * len(self.running), [IDLE] * len(self.running)
        for request in writing:
            tokens[request.place] = [request.tokens[request.length]]
            lengths[request.place] = request.length
        self._read(tokens, lengths, slice(None), 1)
        done = [request for request in running if request.is_done]
        for request in done:
            self._release(request)
        return done

    def _read(self, tokens: list[list[int]], lengths: list[int], places: slice, n: int) -> None:
        given = map(jnp.array, (lengths, self.table[places]))
        after, logit, self.caches = read(self.model, jnp.array(tokens), self.caches, *given)
        answers = zip(self.running[places], lengths, after.tolist(), logit.tolist(), strict=True)
        for request, length, *answer in answers:
            if request is not None and length != IDLE:
                request.advance(n, *answer)
                if n == CHUNK:
                    pages = request.pages[: request.length // PAGE]
                    self.known.setdefault(request.prompt[: request.length], pages)

    def _release(self, request: Request) -> None:
        self.running[request.place] = None
        self.table[request.place] = -1
        self.users.subtract(request.pages)
        unused = {page for page in request.pages if not self.users[page]}
        self.free += unused
        self.known = {key: pages for key, pages in self.known.items() if not unused & {*pages}}


def alone(model: Model, request: Request, places: int) -> Request:
    """The request by itself, from a cache of its own, at the place that it had."""
    again = Request(request.prompt, request.num_new, list(request.prompt))
    caches = model.empty_cache(1, MOST_PAGES * PAGE, jnp.bfloat16)
    while again.reads_chunks:
        chunk = jnp.array([again.tokens[again.length : again.length + CHUNK]])
        after, logit, caches = read(model, chunk, caches, jnp.array([again.length]))
        again.advance(CHUNK, int(after[0]), float(logit[0]))
    here = np.arange(places) == request.place
    caches = jax.tree.map(lambda x: jnp.repeat(x, places, axis=0), caches)
    while not again.is_done:
        tokens = jnp.array(np.where(here, again.tokens[again.length], 0)[:, None])
        lengths = jnp.array(np.where(here, again.length, IDLE))
        after, logit, caches = read(model, tokens, caches, lengths)
        again.advance(1, int(after[request.place]), float(logit[request.place]))
    return again


def requests(count: int, rng: np.random.Generator) -> list[Request]:
    """Every other one begins with the same 20 tokens."""
    common = rng.integers(0, 64, 20)
    made = []
    for i in range(count):
        own = rng.integers(0, 64, rng.integers(1, 30))
        prompt = np.concatenate([common, own]) if i % 2 else own
        made.append(Request(tuple(map(int, prompt)), int(rng.integers(1, 20))))
    return made


def main(*, count: int = 12, places: int = 4, pages: int = 28) -> list[Request]:
    """The requests, finished."""
    # Batch invariant, so that a request's tokens are those that it has alone.
    model = Model(vocabulary=64, width=32, layers=2, batch_invariant=True, rngs=nnx.Rngs(0))
    server = Server(model, places=places, pages=pages)
    arriving = collections.deque(requests(count, np.random.default_rng(0)))
    finished: list[Request] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("compiling", total=count)
        start, before, steps = time.perf_counter(), 0, 0
        while len(finished) < count:
            server.waiting.extend(arriving.popleft() for _ in range(min(2, len(arriving))))
            server.admit()
            finished += server.step()
            progress.update(task, completed=len(finished), description="serving")
            steps += 1
            if steps == 2:  # by now both programs are compiled
                start, before = time.perf_counter(), written(server, finished)
    rate = (written(server, finished) - before) / (time.perf_counter() - start)
    print(f"{rate:.0f} tokens a second, {places} requests at once")
    if sorted(server.free) != list(range(pages)):
        raise AssertionError("pages are lost")
    for request in finished:
        again = alone(model, request, places)
        if (again.tokens, again.logits) != (request.tokens, request.logits):
            raise AssertionError("served together and alone, a request differs")
    return finished


def written(server: Server, finished: list[Request]) -> int:
    """Tokens so far."""
    requests = (*finished, *(request for request in server.running if request is not None))
    return sum(len(request.logits) for request in requests)


if __name__ == "__main__":
    for request in main():
        print(*request.tokens[: len(request.prompt)], "->", *request.tokens[len(request.prompt) :])
