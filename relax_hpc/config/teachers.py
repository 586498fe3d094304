"""Teachers: models that say how likely they find what the policy samples."""

import difflib
import string
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from relax_hpc.algorithms.distill import COLUMN
from relax_hpc.config.layout import Layout, MegatronConfig
from relax_hpc.config.model import ModelConfig
from relax_hpc.schema import TEACHERS, columns_of
from relax_hpc.sections import NAME, Resources, Section, UserPath

if TYPE_CHECKING:
    from relax_hpc.config.run import RunConfig


def fields_of(prompt: str) -> list[str]:
    """Names in braces, in order.

    Raises:
        ValueError: braces are not in pairs, or hold more than a name.
    """
    found = [(name, spec, how) for _, name, spec, how in string.Formatter().parse(prompt)]
    if any(spec or how for _, spec, how in found):
        raise ValueError("has more than a name in braces; write {{ and }} for braces")
    return [name for name, _, _ in found if name is not None]


def _with_fields(prompt: str) -> str:
    if not prompt:
        return prompt
    try:
        names = fields_of(prompt)
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ and }}}} for braces") from None
    if "prompt" not in names or "" in names:
        raise ValueError("leaves the prompt out; write {prompt} where it is to stand")
    return prompt


class TeacherConfig(Section):
    """A teacher, a component of its own: without such a table there is none."""

    path: UserPath | None = None
    """Hugging Face folder of the teacher, of the same tokenizer; unset is what training starts
    with, which needs `prompt`."""
    sources: list[Annotated[str, Field(min_length=1)]] = []
    """Names of `prompts.sources` whose prompts it teaches; one teacher alone has all of them."""
    prompt: Annotated[str, AfterValidator(_with_fields)] = ""
    """Text that it sees in place of the prompt: {prompt} is what the policy is asked, {answer} the
    answer, other names in braces are fields of the row. Unset is the prompt."""
    layout: Layout | None = None
    """Layout of its ranks, as the actor's; unset is the actor's."""
    resources: Resources = Resources()

    def model(self, trained: ModelConfig) -> ModelConfig:
        """Returns the model that it is; `trained` is the policy's."""
        if self.path is None:
            return trained
        return trained.model_copy(update={"path": self.path, "weights": None})

    def megatron(self, actor: MegatronConfig, name: str) -> MegatronConfig:
        """Returns how the teacher `name` computes: as the actor does, in its own layout if it has
        one."""
        of_actor: dict[str, Any] = {key: getattr(actor, key) for key in MegatronConfig.model_fields}

        class TeacherMegatron(MegatronConfig):
            section: ClassVar[str] = f"teachers.{name}"

        return TeacherMegatron(**of_actor | {"layout": self.layout or actor.layout})


Teachers = dict[Annotated[str, Field(pattern=NAME, max_length=100)], TeacherConfig]


def component_of(name: str) -> str:
    """The component of a teacher."""
    return f"teacher-{name}"


def columns_by_teacher(teachers: Mapping[str, TeacherConfig]) -> dict[str, str]:
    """Name -> the column that it writes."""
    pairs = zip(teachers, TEACHERS, strict=False)
    return {name: next(iter(columns_of(role))) for name, role in pairs}


def check(config: "RunConfig") -> None:
    """Looks for teachers that cannot be.

    Raises:
        ValueError: there is one; names the key and the remedy.
    """
    wanted = config.algorithm.needs.columns.get(COLUMN)
    if not config.teachers:
        if wanted:
            raise ValueError(f"{wanted}: needs a teacher; add a table [teachers.NAME]")
        return
    if not wanted:
        raise ValueError(
            f"teachers.{next(iter(config.teachers))}: nobody learns from it with "
            f"algorithm.distill.name = {config.algorithm.distill.name!r}; use algorithm.preset = "
            "'distill', or algorithm.distill.name = 'advantage', or remove it"
        )
    if len(config.teachers) > len(TEACHERS):
        raise ValueError(
            f"teachers: there are {len(config.teachers)}; use at most {len(TEACHERS)}, each may "
            "have several sources"
        )
    _see_something(config)
    _have_pupils(config)


def _see_something(config: "RunConfig") -> None:
    for name, teacher in config.teachers.items():
        if teacher.path is None and not teacher.prompt:
            raise ValueError(
                f"teachers.{name}.path: is not set, so it is what training starts with and sees "
                "what the policy sees: it has nothing to teach; set path, or prompt"
            )
        if teacher.prompt and config.rollout.environment != "single_turn":
            raise ValueError(
                f"teachers.{name}.prompt: an episode of rollout.environment = "
                f"{config.rollout.environment!r} is no prompt and a response; remove it, or use "
                "'single_turn'"
            )


def _have_pupils(config: "RunConfig") -> None:
    known = config.prompts.sources
    of: dict[str, str] = {}
    for name, teacher in config.teachers.items():
        key = f"teachers.{name}.sources"
        if not teacher.sources and len(config.teachers) > 1:
            raise ValueError(f"{key}: is not set; say what each of several teachers teaches")
        for source in teacher.sources:
            if source not in known:
                raise ValueError(f"{key} = {teacher.sources}: {_unknown(source, known)}")
            if source in of:
                raise ValueError(
                    f"{key} = {teacher.sources}: teachers.{of[source]} teaches {source} already; "
                    "leave it to one of them"
                )
            of[source] = name
    if of and (left := [source for source in known if source not in of]):
        raise ValueError(
            f"prompts.sources.{left[0]}: has no teacher; add it to the sources of one of "
            f"{', '.join(f'teachers.{name}' for name in config.teachers)}"
        )


def _unknown(source: str, known: Mapping[str, Any]) -> str:
    if not known:
        return f"there is no prompts.sources.{source}, only prompts.train; remove it"
    close: Iterator[str] = iter(difflib.get_close_matches(source, known, n=1))
    hint = next((f"did you mean {name}?" for name in close), f"use {', '.join(known)}")
    return f"there is no prompts.sources.{source}; {hint}"
