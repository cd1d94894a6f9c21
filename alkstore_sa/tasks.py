"""The registry of tasks: what a process can run, by name and by queue. Nothing is ever called by a name that is not in it."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar, overload

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from alkstore_sa._cadence import parsed_interval
from alkstore_sa._names import checked_name
from alkstore_sa._options import PLAIN, PRIORITIES, Duration, positive, whole
from alkstore_sa.aio import AsyncStore
from alkstore_sa.errors import InvalidName, NotBound
from alkstore_sa.handlers import Handler, identity, refuse_arguments
from alkstore_sa.handles import JobHandle
from alkstore_sa.outbox import backing_queue
from alkstore_sa.records import Job, Schedule
from alkstore_sa.signatures import signature_of
from alkstore_sa.store import Store
from alkstore_sa.task import Binding, Definition, OnEnqueue, Task, bound

log: Final = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=Callable[..., Any])

Around: TypeAlias = Callable[[JobHandle], AbstractContextManager[Any]]
OnDead: TypeAlias = Callable[[Job], None]
SessionFactory: TypeAlias = Callable[[], Session]
AsyncSessionFactory: TypeAlias = Callable[[], AsyncSession]


class Tasks:
    """A registry of tasks, of raw handlers and of deliveries, and the hooks around them.

    `store` binds it at once; otherwise `bind` does, once per process. `imports` names modules that register tasks here, for the worker to
    import first. `session_factory` makes the Session that a handler is given (default: on the store's engine), `async_engine` is what an
    AsyncSession is made on. `around(job)` gives a context manager that is entered around each run, `on_dead(job)` is called for a job
    that a worker sent to the dead, `on_enqueue(task, headers)` may add to the headers of what is about to be stored.
    """

    def __init__(
        self,
        store: Store | AsyncStore | None = None,
        *,
        imports: Iterable[str] = (),
        session_factory: SessionFactory | None = None,
        async_engine: AsyncEngine | None = None,
        around: Around | None = None,
        on_dead: OnDead | None = None,
        on_enqueue: OnEnqueue | None = None,
    ) -> None:
        self.imports: Final = tuple(imports)
        self.session_factory: Final = session_factory
        self.async_engine: Final = async_engine
        self.around: Final = around
        self.on_dead: Final = on_dead
        self._binding: Final = Binding(None, on_enqueue)
        if store is not None:
            bound(self._binding, store)
        self._tasks: Final[dict[str, Task[..., Any]]] = {}
        self._aliases: Final[dict[str, str]] = {}
        self._raw: Final[dict[str, Handler]] = {}
        self._deliveries: Final[dict[str, Handler]] = {}
        self._every: Final[dict[str, tuple[Task[..., Any], str]]] = {}

    def bind(self, store: Store | AsyncStore) -> "Tasks":
        """Say in which store the tasks' jobs live; once per process, for an AsyncStore beside a Store once each.

        Raises:
            InvalidOption: another store is bound already (for a second store there is `task.on(store)`).
        """
        bound(self._binding, store)
        return self

    @property
    def store(self) -> Store | None:
        """The store that was bound, if any."""
        return self._binding.store if self._binding.find is None else self._binding.find()

    @property
    def async_store(self) -> AsyncStore | None:
        """The AsyncStore that was bound, if any."""
        return self._binding.async_store

    def find_store_by(self, find: Callable[[], Store]) -> None:
        """Say how to find the store from now on, where it is another one from context to context: for integrations."""
        self._binding.find = find

    def under(self, store: Store, *, around: Around | None = None, session_factory: SessionFactory | None = None) -> "Tasks":
        """Give the same registry as one application's worker sees it, with a store and hooks of its own: for integrations."""
        seen = Tasks(
            store,
            imports=self.imports,
            session_factory=self.session_factory or session_factory,
            async_engine=self.async_engine,
            around=around or self.around,
            on_dead=self.on_dead,
            on_enqueue=self._binding.on_enqueue,
        )
        vars(seen).update({name: value for name, value in vars(self).items() if isinstance(value, dict)})  # what is declared later, too
        return seen

    # -- declare ----------------------------------------------------------------------------------------------------

    def task(
        self,
        *,
        queue: str = "default",
        name: str | None = None,
        max_attempts: int | None = None,
        base_backoff: Duration | None = None,
        visibility_timeout: Duration = 60,
        timeout: Duration | None = None,
        priority: int = 0,
        own_commit: bool = False,
        aliases: Iterable[str] = (),
    ) -> "TaskDecorator":
        """Declare the decorated function, sync or async, a task of `queue`.

        Its leading parameters annotated exactly `JobHandle`, then `Session` (async: `AsyncSession`), are put in by the worker; the others
        are stored by name, as JSON, by their annotations. `name` (default: `module:qualname`) is stored with each job, `aliases` are the
        names that older jobs may be stored under. `max_attempts` 3 runs in all, `base_backoff` 5 s, `visibility_timeout` as for
        `Store.queue`; the worker keeps a running job's claim alive. `timeout` is the longest that a run may take. `own_commit` lets the
        function commit its Session itself, once, and that commit is the ack.

        Raises (at decoration):
            TypeError: the function's parameters are not storable, or are injected in the wrong place.
            InvalidName: the name is taken by another function, or has to be given (functions of `__main__` and local ones).
            InvalidOption: an option out of its range.
        """
        stamps = PLAIN.overridden(visibility_timeout=visibility_timeout, max_attempts=max_attempts, base_backoff=base_backoff)
        checked_name("queue", queue)
        whole("priority", priority, PRIORITIES.start, PRIORITIES.stop - 1)
        seconds = None if timeout is None else positive("timeout", timeout).total_seconds()
        others = tuple(checked_name("task", alias) for alias in aliases)
        if name is not None:
            checked_name("task", name)

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            signature = signature_of(function)
            if own_commit and signature.session is None:
                raise TypeError(f"{function.__qualname__}: own_commit is about an injected Session, which it does not take")
            handler = Handler(_name(function, name), function, signature, timeout=seconds, own_commit=own_commit)
            return self._register(Task(Definition(handler, queue, stamps, priority, others), self._binding))

        return TaskDecorator(register)

    def raw(
        self, *, queue: str, timeout: Duration | None = None, own_commit: bool = False
    ) -> Callable[[Callable[Concatenate[JobHandle, P], R]], Callable[Concatenate[JobHandle, P], R]]:
        """Let the decorated function handle the jobs of `queue` that are of no task: it takes the JobHandle, perhaps a Session."""
        checked_name("queue", queue)
        return self._decorator(self._raw, queue, f"the raw handler of queue {queue!r}", timeout, own_commit)

    def delivery(
        self, outbox: str, *, timeout: Duration | None = None
    ) -> Callable[[Callable[Concatenate[JobHandle, P], R]], Callable[Concatenate[JobHandle, P], R]]:
        """Let the decorated function deliver the messages of `outbox`: it takes the JobHandle, perhaps a Session."""
        backing_queue(outbox)
        return self._decorator(self._deliveries, outbox, f"the delivery of outbox {outbox!r}", timeout, own_commit=False)

    def every(self, spec: str, *, name: str | None = None) -> Callable[[Task[P, R]], Task[P, R]]:
        """Schedule the decorated task, which must do without arguments, at every boundary of `spec`; `name` defaults to the task's.

        It is registered by `sync_schedules`, which a worker calls at its start.

        Raises:
            InvalidSpec, InvalidName: at once.
            TypeError: at decoration; it is no task, or one that needs arguments.
        """
        parsed_interval(spec)
        if name is not None:
            checked_name("schedule", name)

        def register(task: Task[P, R]) -> Task[P, R]:
            if not isinstance(task, Task):
                raise TypeError(f"{task!r} is no task: put @tasks.every(…) above @tasks.task(…)")
            if task.definition.handler.signature.required:
                raise TypeError(f"task {task.name!r} needs arguments: schedule it by task.schedule(name, spec, …)")
            self._every[name or task.name] = (task, spec)
            return task

        return register

    def sync_schedules(self) -> "ScheduleSync":
        """Register every schedule that was declared by `every`, and tell which stored ones are of tasks that are not here.

        Those are left alone, since they may be another application's; `Store.unschedule` forgets one.
        """
        store = self._binding.store
        if store is None:
            raise NotBound("these tasks have no store yet: write `tasks.bind(store)` once, where your process starts")
        registered = [self._scheduled(name, task, spec) for name, (task, spec) in self._every.items()]
        orphaned = [one for one in store.schedules() if one.task is not None and one.task not in self]
        for one in orphaned:
            log.warning("schedule %r is of task %r, which is not registered here", one.name, one.task)
        return ScheduleSync(registered, orphaned)

    @staticmethod
    def _scheduled(name: str, task: Task[..., Any], spec: str) -> Schedule:
        return task.schedule(name, spec)

    def _decorator(
        self, registered: dict[str, Handler], key: str, what: str, timeout: Duration | None, own_commit: bool
    ) -> Callable[[H], H]:
        seconds = None if timeout is None else positive("timeout", timeout).total_seconds()

        def register(function: H) -> H:
            signature = signature_of(function)
            refuse_arguments(what, signature)
            handler = Handler(identity(function), function, signature, takes_arguments=False, timeout=seconds, own_commit=own_commit)
            if key in registered and registered[key].name != handler.name:
                raise InvalidName(f"{what} is {registered[key].name} already, not {handler.name}")
            registered[key] = handler
            return function

        return register

    def _register(self, task: Task[..., Any]) -> Task[..., Any]:
        for name in (task.name, *task.definition.aliases):
            other = self._tasks.get(self._aliases.get(name, name))
            if other is not None and identity(other.fn) != identity(task.fn):
                raise InvalidName(f"task {name!r} is {identity(other.fn)} already, not {identity(task.fn)}")
        self._tasks[task.name] = task
        self._aliases.update(dict.fromkeys(task.definition.aliases, task.name))
        return task

    # -- look up ----------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Task[..., Any]:
        """Give the task of that name or alias; raises `KeyError`."""
        return self._tasks[self._aliases.get(name, name)]

    def __contains__(self, name: object) -> bool:
        return name in self._tasks or name in self._aliases

    def handler(self, queue: str, task: str | None) -> Handler | None:
        """Give what runs a job of that queue and task, None where nothing here does."""
        if task is not None:
            known = self._tasks.get(self._aliases.get(task, task))
            return None if known is None else known.definition.handler
        return self._raw.get(queue) or next((one for name, one in self._deliveries.items() if backing_queue(name) == queue), None)

    def handlers_of(self, queues: Iterable[str]) -> Sequence[Handler]:
        """Give what is registered to be run on these queues, those behind outboxes included."""
        served = set(queues)
        tasks = [task.definition.handler for task in self._tasks.values() if task.queue in served]
        raw = [handler for queue, handler in self._raw.items() if queue in served]
        return [*tasks, *raw, *(handler for name, handler in self._deliveries.items() if backing_queue(name) in served)]

    def runs_async(self, queues: Iterable[str]) -> bool:
        """Whether a job of these queues may be a coroutine function's: a task is found by its name, whichever queue its job lies in."""
        tasks = [task.definition.handler for task in self._tasks.values()]
        return any(handler.is_async for handler in (*tasks, *self.handlers_of(queues)))

    def known(self, queues: Iterable[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Tell the names of tasks under which jobs can be run here, and for which of `queues` those of no task can be."""
        return sorted({*self._tasks, *self._aliases}), [queue for queue in queues if self.handler(queue, None) is not None]

    @property
    def declares_schedules(self) -> bool:
        """Whether `every` was used."""
        return bool(self._every)

    @property
    def queues(self) -> Sequence[str]:
        """The queues of the tasks and of the raw handlers, in the order of their declaration."""
        return list(dict.fromkeys([*(task.queue for task in self._tasks.values()), *self._raw]))

    @property
    def outboxes(self) -> Sequence[str]:
        """The outboxes that a delivery is registered for."""
        return list(self._deliveries)


@dataclass(frozen=True, slots=True)
class ScheduleSync:
    """What `sync_schedules` did and found."""

    registered: Sequence[Schedule]
    orphaned: Sequence[Schedule]  # stored, of a task that this registry does not have


class TaskDecorator:
    """What `tasks.task(…)` gives: it turns a function into a Task whose verbs take the function's own parameters."""

    def __init__(self, register: Callable[[Callable[..., Any]], Task[..., Any]]) -> None:
        self._register = register

    @overload
    def __call__(self, function: Callable[Concatenate[JobHandle, Session, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[JobHandle, AsyncSession, P], Awaitable[R]], /) -> Task[P, Awaitable[R]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[JobHandle, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Session, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[AsyncSession, P], Awaitable[R]], /) -> Task[P, Awaitable[R]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any]:
        """Register the function and return its task."""
        return self._register(function)


def _name(function: Callable[..., Any], given: str | None) -> str:
    if given is not None:
        return given
    if function.__module__ == "__main__" or "<locals>" in function.__qualname__:
        raise InvalidName(f"{identity(function)} is called otherwise in a worker: give the task a name=")
    return checked_name("task", identity(function))
