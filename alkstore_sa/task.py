"""A task: a function that can be stored as a job, with everything that its row is stamped with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar, Unpack

from alkstore_sa._options import EnqueueOptions, Stamps, placement
from alkstore_sa._payload import Payload
from alkstore_sa.aio import AsyncStore
from alkstore_sa.aio_handles import AsyncTx, joined
from alkstore_sa.errors import InvalidOption, NotBound
from alkstore_sa.handlers import Handler
from alkstore_sa.handles import Queue
from alkstore_sa.records import Schedule
from alkstore_sa.seam import Tx
from alkstore_sa.store import Store

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

OnEnqueue: TypeAlias = Callable[["Task[..., Any]", dict[str, str]], None]


@dataclass(slots=True)
class Binding:
    """Which store a registry's tasks are stored in, and who is told of it; shared by all of them."""

    store: Store | None
    on_enqueue: OnEnqueue | None
    async_store: AsyncStore | None = None
    find: Callable[[], Store] | None = None  # where the store is another one from context to context


def bound(binding: Binding, store: Store | AsyncStore) -> Binding:
    """Bind a store, and an AsyncStore beside it.

    Raises:
        InvalidOption: another one of its kind is bound already.
    """
    if binding.find is not None and not isinstance(store, AsyncStore):
        return binding
    known = binding.async_store if isinstance(store, AsyncStore) else binding.store
    if known not in (None, store):
        raise InvalidOption("these tasks are bound to another store already; for a second store use task.on(store)")
    if isinstance(store, AsyncStore):
        binding.async_store = store
    else:
        binding.store = store
    return binding


@dataclass(frozen=True, slots=True)
class Call:
    """A task's call, not yet stored; made by `task.call(…)`, for `enqueue_many`."""

    task: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class Definition:
    """What was said of a task where it was declared."""

    handler: Handler
    queue: str
    stamps: Stamps
    priority: int
    aliases: tuple[str, ...]


class Task(Generic[P, R_co]):
    """A function that can be stored as a job; made by `@tasks.task(…)`.

    The verbs take the function's own parameters, without those that the worker puts in. `fn` is the function with all of them. Called
    directly, a task without injected parameters just runs its function, here and now.
    """

    def __init__(
        self,
        definition: Definition,
        binding: Binding,
        *,
        store: Store | AsyncStore | None = None,
        options: EnqueueOptions | None = None,
    ) -> None:
        self.definition: Final = definition
        self.name: Final = definition.handler.name
        self.queue: Final = definition.queue
        self.fn: Final[Callable[..., R_co]] = definition.handler.function
        self._binding = binding
        self._store = store
        self._of = binding if store is None else bound(Binding(None, None), store)
        self._options: EnqueueOptions = {"priority": definition.priority} if options is None else options
        self._stored_in: tuple[Store, Queue] | None = None
        self.__doc__ = self.fn.__doc__

    def __repr__(self) -> str:
        return f"<Task {self.name!r} on queue {self.queue!r}>"

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function here and now, storing nothing; a function that takes a JobHandle or a Session is called as `task.fn`."""
        signature = self.definition.handler.signature
        if signature.takes_job or signature.session is not None:
            raise TypeError(f"task {self.name!r} is given a JobHandle or a Session by the worker; call it yourself as task.fn(…)")
        return self.fn(*args, **kwargs)

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> int:
        """Store a call of the task and return the job's id; committed when this returns. One statement.

        Raises:
            TypeError: the function cannot be called like this.
            InvalidPayload: an argument does not fit its annotation or cannot be stored.
            NotBound: there is no store yet.
        """
        return self._queue().enqueue(self._payload(args, kwargs), **self._with_headers())

    def enqueue_tx(self, tx: Tx, /, *args: P.args, **kwargs: P.kwargs) -> int:
        """Store a call of the task through the caller's transaction and return the job's id; it commits or vanishes with it.

        Raises: as `enqueue`, and as `Queue.enqueue_tx`.
        """
        return self._queue().enqueue_tx(tx, self._payload(args, kwargs), **self._with_headers())

    async def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> int:
        """Store a call of the task in the AsyncStore and return the job's id; committed when this returns. Raises as `enqueue`."""
        queue = self._async_store().stamped_queue(self.queue, self.definition.stamps, task=self.name)
        return await queue.enqueue(self._payload(args, kwargs), **self._with_headers())

    async def aenqueue_tx(self, tx: AsyncTx, /, *args: P.args, **kwargs: P.kwargs) -> int:
        """Store a call of the task through the asynchronous caller's transaction, as `enqueue_tx` does."""
        return await joined(tx, self._queue().enqueue_tx, self._payload(args, kwargs), **self._with_headers())

    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Make a call of the task for `enqueue_many`; raises as `enqueue`, but needs no store."""
        return Call(self.name, self._payload(args, kwargs))

    def enqueue_many(self, calls: Iterable[Call]) -> list[int]:
        """Store calls of this task, all or none, and return the jobs' ids in their order; raises as `enqueue`."""
        return self._queue().enqueue_many(self._payloads(calls), **self._with_headers())

    def enqueue_many_tx(self, tx: Tx, calls: Iterable[Call], /) -> list[int]:
        """Store calls of this task through the caller's transaction, as `enqueue_many` and `enqueue_tx` do."""
        return self._queue().enqueue_many_tx(tx, self._payloads(calls), **self._with_headers())

    def schedule(self, name: str, spec: str, /, *args: P.args, **kwargs: P.kwargs) -> Schedule:
        """Register the schedule `name`, or change it: this call of the task at every boundary of `spec`, as `Store.schedule` does.

        Raises:
            InvalidOption: the task has a `delay` or a `run_at`; when a schedule's jobs run is the schedule's to say.
            InvalidName, InvalidSpec: before anything is sent. Otherwise as `enqueue`.
        """
        options = self._schedulable()
        payload = self._payload(args, kwargs)
        return self.store.stamped_schedule(name, spec, self.queue, payload, self.definition.stamps, task=self.name, **options)

    async def aschedule(self, name: str, spec: str, /, *args: P.args, **kwargs: P.kwargs) -> Schedule:
        """Register the schedule in the AsyncStore, as `schedule` does."""
        options = self._schedulable()
        payload = self._payload(args, kwargs)
        store = self._async_store()
        return await store.stamped_schedule(name, spec, self.queue, payload, self.definition.stamps, task=self.name, **options)

    def options(self, **options: Unpack[EnqueueOptions]) -> "Task[P, R_co]":
        """Give the same task whose jobs are stored with these options (`delay`, `run_at`, `priority`, `expires`, …).

        Raises:
            InvalidOption: at once, as `Queue.enqueue` would.
        """
        merged: EnqueueOptions = {**self._options, **options}
        placement(self.definition.stamps, **merged)
        return Task(self.definition, self._binding, store=self._store, options=merged)

    def on(self, store: Store | AsyncStore) -> "Task[P, R_co]":
        """Give the same task, stored in another store."""
        return Task(self.definition, self._binding, store=store, options=self._options)

    def _async_store(self) -> AsyncStore:
        store = self._of.async_store
        if store is None:
            raise NotBound(f"task {self.name!r} has no AsyncStore: write `tasks.bind(AsyncStore(…))` once, where your process starts")
        return store

    def _schedulable(self) -> EnqueueOptions:
        options = self._with_headers()
        if options.get("delay") is not None or options.get("run_at") is not None:
            raise InvalidOption("a schedule says itself when its jobs run: leave delay and run_at out")
        return options

    def _queue(self) -> Queue:
        store = self.store
        kept = self._stored_in
        if kept is None or kept[0] is not store:
            self._stored_in = kept = (store, store.stamped_queue(self.queue, self.definition.stamps, task=self.name))
        return kept[1]

    @property
    def store(self) -> Store:
        """The store that the task's jobs go to; raises `NotBound` while there is none."""
        if self._of.find is not None:
            return self._of.find()
        store = self._of.store or (None if self._of.async_store is None else self._of.async_store.sync)
        if store is None:
            raise NotBound(f"task {self.name!r} has no store yet: write `tasks.bind(store)` once, where your process starts")
        return store

    def _payload(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Payload:
        return self.definition.handler.signature.stored(args, kwargs)

    def _payloads(self, calls: Iterable[Call]) -> list[Payload]:
        made = list(calls)
        for one in made:
            if not isinstance(one, Call):
                raise TypeError(f"{one!r} is no Call: make it by task.call(…)")
            if one.task != self.name:
                raise InvalidOption(f"this is a call of task {one.task!r}, not of {self.name!r}")
        return [one.payload for one in made]

    def _with_headers(self) -> EnqueueOptions:
        hook = self._binding.on_enqueue
        if hook is None:
            return self._options
        headers = dict(self._options.get("headers") or {})
        hook(self, headers)
        return {**self._options, "headers": headers}
