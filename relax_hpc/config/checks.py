"""Refuses combinations of settings of different sections that do not work."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relax_hpc.algorithms.advantages.none import NoAdvantage
from relax_hpc.algorithms.advantages.pass_k import PassK
from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.distill import COLUMN
from relax_hpc.algorithms.groups import Refill
from relax_hpc.algorithms.kl import Kl
from relax_hpc.algorithms.presets import KL_IN_THE_REWARD
from relax_hpc.config.engines import OWN_UNDER_LEASE, ROLLOUT, EnginePool, follows_policy
from relax_hpc.errors import nearest
from relax_hpc.schema import TEACHERS, columns_of

if TYPE_CHECKING:
    from relax_hpc.config.run import RunConfig

_GRID = "(tensor x pipeline x context x data_parallel)"


def check(config: "RunConfig") -> None:
    """Raises:
    ValueError: two settings do not go together; names the key and the remedy.
    """
    _check_program(config)
    for name, pool in config.engines.items():
        check_pool(name, pool)
    _check_routed_experts(config)
    if config.rollout_pool.placement == "actor":
        _check_shared_gpus(config)
    elif (count := config.rollout_pool.advanced.engines_per_gpu) > 1:
        _check_no_broadcast(config, count)
    if config.launch.layout == "separate":
        _check_separate_sides(config)
    _check_reference(config)
    if config.rollout.advanced.over_sampling and config.schedule.over_age == "wait":
        raise ValueError(
            f"rollout.advanced.over_sampling = {config.rollout.advanced.over_sampling}: needs "
            "batches of the first that are ready; set schedule.over_age to 'drop' or 'mask'"
        )
    _check_algorithm(config)
    _check_teachers(config)
    _check_best(config)
    _check_tasks_fill_nodes(config)


def _check_best(config: "RunConfig") -> None:
    if (name := config.actor.advanced.keep_best) is None:
        return
    if name not in config.eval:
        there = ", ".join(map(repr, config.eval)) or "none"
        raise ValueError(
            f"actor.advanced.keep_best = {name!r}: no held-out set has this name (there is "
            f"{there}); name a table [eval.NAME]"
        )
    every, save_every = config.eval[name].every, config.actor.save_every
    if not every or every % save_every:
        raise ValueError(
            f"eval.{name}.every = {every}: actor.advanced.keep_best needs a multiple of "
            f"actor.save_every = {save_every}, so that each evaluated policy has a checkpoint"
        )


def check_nodes(key: str, tasks: int, nodes: int) -> None:
    if tasks % nodes:
        raise ValueError(
            f"{key} = {tasks}: does not divide over {nodes} nodes; "
            f"use a multiple of {nodes}, or change resources.nodes"
        )


def check_ranks(whose: str, ranks: int, nodes: int) -> None:
    check_nodes(f"{whose} {_GRID}", ranks, nodes)


def _check_tasks_fill_nodes(config: "RunConfig") -> None:
    for name, pool in config.engines.items():
        nodes = (config.actor if pool.placement == "actor" else pool).resources.nodes
        several = f" / engines.{name}.engines_per_task" * (pool.engines_per_task > 1)
        check_nodes(f"engines.{name}.count{several}", pool.num_tasks, nodes)
    reference, critic = config.reference, config.critic
    if reference.placement == "own":
        ranks = config.reference_megatron.layout.world_size
        check_ranks("the reference's ranks", ranks, reference.resources.nodes)
    if critic:
        ranks = critic.megatron(config.actor).layout.world_size
        check_ranks("the critic's ranks", ranks, critic.resources.nodes)
    for name, teacher in config.teachers.items():
        ranks = teacher.megatron(config.actor, name).layout.world_size
        check_ranks(f"the ranks of teachers.{name}", ranks, teacher.resources.nodes)


def _check_program(config: "RunConfig") -> None:
    rollout = config.rollout
    is_asked, is_there = rollout.environment == "program", rollout.program is not None
    if is_asked and not is_there:
        raise ValueError(
            "rollout.program.command: is required with rollout.environment = 'program'; add it"
        )
    if is_there and not is_asked:
        raise ValueError(
            f"rollout.environment = {rollout.environment!r}: starts no program, and there is a "
            "table [rollout.program]; use 'program', or remove the table"
        )


def check_pool(name: str, pool: EnginePool) -> None:
    """Checks a pool by itself.

    Raises:
        ValueError: an impossible combination; names the remedy.
    """
    key = f"engines.{name}"
    _check_weights(key, name, pool)
    per_task = f"{key}.engines_per_task = {pool.engines_per_task}"
    if pool.count % pool.engines_per_task:
        raise ValueError(f"{per_task}: does not divide {key}.count = {pool.count}; use a divisor")
    if pool.engines_per_task > 1 and pool.nodes_per_engine > 1:
        raise ValueError(
            f"{per_task}: an engine over {pool.nodes_per_engine} nodes ({key}.nodes_per_engine) "
            "has a task on each of them for itself; use 1"
        )
    _check_shared_gpu(key, pool)
    if pool.nodes_per_engine == 1:
        return
    spread = f"{key}.nodes_per_engine = {pool.nodes_per_engine}"
    if pool.kind != "sglang":
        raise ValueError(
            f"{spread}: the embedded engine is one process; use {key}.kind = 'sglang', or 1"
        )
    if pool.resources.nodes != pool.num_tasks:
        raise ValueError(
            f"{spread}: {pool.count} engines take {pool.num_tasks} nodes of their own; "
            f"set {key}.resources.nodes to it"
        )


def _check_shared_gpu(key: str, pool: EnginePool) -> None:
    """Checks what goes with several engines on a GPU, but for their size."""
    count, own = pool.advanced.engines_per_gpu, f"{key}.advanced.engines_per_gpu"
    if count == 1:
        return
    if pool.nodes_per_engine > 1:
        raise ValueError(
            f"{own} = {count}: an engine over {pool.nodes_per_engine} nodes "
            f"({key}.nodes_per_engine) shares no GPU; use 1"
        )
    if pool.engines_per_task % count:
        raise ValueError(
            f"{own} = {count}: engines that share a GPU are of one task; set "
            f"{key}.engines_per_task = {pool.engines_per_task} to a multiple of it"
        )
    if pool.kind == "sglang" and "max_total_tokens" not in pool.args:
        raise ValueError(
            f"{own} = {count}: an engine takes its share of a GPU without regard to others that "
            f"start there; set {key}.args.max_total_tokens, the tokens that each caches"
        )


def _check_weights(key: str, name: str, pool: EnginePool) -> None:
    if follows_policy(name) and pool.model is not None:
        raise ValueError(
            f"{key}.model = '{pool.model}': its weights follow the policy, whose model is "
            "model.path; leave it out"
        )
    if follows_policy(name):
        return
    if pool.placement != "own":
        raise ValueError(
            f"{key}.placement = {pool.placement!r}: only the pool that follows the policy shares "
            "the actor's GPUs; use 'own'"
        )
    if pool.resources.max_nodes is not None:
        raise ValueError(
            f"{key}.resources.max_nodes = {pool.resources.max_nodes}: engines are added to the "
            f"pool {ROLLOUT} only; remove it"
        )


def _check_routed_experts(config: "RunConfig") -> None:
    if not config.rollout.advanced.routed_experts:
        return
    if config.rollout_pool.kind != "sglang":
        raise ValueError(
            "rollout.advanced.routed_experts = true: the embedded engine has no experts; use "
            "engines.rollout.kind = 'sglang', or false"
        )
    if config.rollout.stop:
        raise ValueError(
            "rollout.advanced.routed_experts = true: an engine tells experts of responses that it "
            "ends itself, and it knows no texts (rollout.stop); use false, or no stop"
        )


def _check_shared_gpus(config: "RunConfig") -> None:
    """Checks that actor and rollout can share GPUs."""
    pool, key = config.rollout_pool, 'engines.rollout.placement = "actor"'
    if config.schedule.max_staleness:
        raise ValueError(
            f"schedule.max_staleness = {config.schedule.max_staleness}: with {key} nothing is "
            "sampled while the actor trains; set it to 0"
        )
    if pool.nodes_per_engine > 1:
        raise ValueError(
            f"engines.rollout.nodes_per_engine = {pool.nodes_per_engine}: with {key} "
            "an engine is on one node; use 1"
        )
    if config.launch.advanced.bootstrap == "mpi_job":
        raise ValueError(
            f"launch.advanced.bootstrap = 'mpi_job': with {key} there are two steps on the same "
            "nodes; use 'mpi'"
        )
    asked, actors = pool.resources, config.actor.resources
    if asked.max_nodes is not None:
        raise ValueError(
            f"engines.rollout.resources.max_nodes = {asked.max_nodes}: with {key} "
            "engines are on the actor's GPUs, and none can be added; remove it"
        )
    for name in asked.model_fields_set - set(OWN_UNDER_LEASE):
        if getattr(asked, name) != getattr(actors, name):
            raise ValueError(
                f"engines.rollout.resources.{name} = {getattr(asked, name)!r}: with {key} "
                f"it is actor.resources.{name} = {getattr(actors, name)!r}; remove it"
            )


def _check_no_broadcast(config: "RunConfig", count: int) -> None:
    """Refuses a broadcast to engines that share a GPU, of which NCCL takes one rank only."""
    if config.weights.transport == "collective":
        raise ValueError(
            "weights.transport = 'collective': NCCL takes no two ranks on one GPU, and "
            f"engines.rollout.advanced.engines_per_gpu = {count}; use 'files'"
        )


def _check_separate_sides(config: "RunConfig") -> None:
    """Refuses settings that need both sides at the same time."""
    apart = "with launch.layout = 'separate'"
    pool, weights = config.rollout_pool, config.weights
    if pool.placement != "own":
        raise ValueError(
            f"engines.rollout.placement = {pool.placement!r}: {apart} engines and actor have no "
            "GPUs in common; use 'own'"
        )
    if weights.transport != "files":
        raise ValueError(
            f"weights.transport = {weights.transport!r}: {apart} nobody may be there to receive a "
            "broadcast; use 'files'"
        )
    if config.launch.advanced.bootstrap == "mpi_job":
        raise ValueError(
            f"launch.advanced.bootstrap = 'mpi_job': {apart} there is no step of all "
            "components; use 'mpi'"
        )
    if waiting := [name for name in config.eval if config.eval[name].advanced.one_policy]:
        raise ValueError(
            f"eval.{waiting[0]}.advanced.one_policy = true: {apart} engines take the next policy "
            "whenever it is there; use false"
        )
    if config.prompts.retire_after:
        raise ValueError(
            f"prompts.retire_after = {config.prompts.retire_after}: {apart} the trainer may not be "
            "there to tell which prompts are solved; use 0"
        )
    if weights.quantize != "none":
        raise ValueError(
            f"weights.quantize = {weights.quantize!r}: {apart} engines begin before the trainer "
            "has written anything; use 'none'"
        )
    if config.model.weights is not None:
        raise ValueError(
            f"model.weights = '{config.model.weights}': {apart} engines begin with the model in "
            "model.path; convert it (relax-hpc convert --to hf) and name that in model.path"
        )


def _check_reference(config: "RunConfig") -> None:
    for column, key in config.algorithm.needs.columns.items():
        if column in columns_of("reference") and config.reference.placement == "none":
            raise ValueError(
                f"{key}: needs a reference; set reference.placement to 'actor' or 'own'"
            )


def _check_algorithm(config: "RunConfig") -> None:
    algorithm = config.algorithm
    _check_trust_region(algorithm, config.schedule.max_staleness)
    _check_weights_once(algorithm)
    _check_mean_of_ratios(algorithm)
    _check_kl_gradient(algorithm)
    _check_something_teaches(algorithm)
    _check_siblings(algorithm, config.rollout.samples_per_prompt)
    _check_overlong(algorithm, config)
    _check_solved_groups_are_on_record(algorithm, config)
    _check_split(algorithm, config)
    _check_lowest_rewards(algorithm, config)
    _check_critic(algorithm, config)


def _check_trust_region(algorithm: Algorithm, lag: int) -> None:
    loss = algorithm.loss
    updates = algorithm.epochs_per_step * algorithm.mini_batches
    if not loss.has_trust_region or "old" not in loss.needs().anchors or updates > 1 or not lag:
        return
    if "rollout" in loss.needs().anchors:
        return
    raise ValueError(
        "algorithm.loss.anchor = 'old': with one epoch and one mini-batch the policy before the "
        f"step is the one that is trained, so every ratio is 1, {loss.name} bounds nothing, and it "
        f"is a plain policy gradient on samples up to {lag} policies old; use anchor = 'rollout', "
        "or algorithm.epochs_per_step or algorithm.mini_batches of 2 or more, or loss.name = "
        "'policy_gradient'"
    )


def _check_weights_once(algorithm: Algorithm) -> None:
    correction = algorithm.correction
    if correction.has_ratios and "rollout" in algorithm.loss.needs().anchors:
        raise ValueError(
            f"algorithm.correction.name = {correction.name!r}: the ratio of algorithm.loss.name = "
            f"{algorithm.loss.name!r} is to the sampler already, so that importance would count "
            "twice; set correction.name = 'none', or loss.anchor = 'old'"
        )


def _check_mean_of_ratios(algorithm: Algorithm) -> None:
    if algorithm.loss.ratio_of == "sequence" and algorithm.aggregation != "sequence":
        raise ValueError(
            f"algorithm.aggregation = {algorithm.aggregation!r}: the ratio of "
            f"{algorithm.loss.name} is of a sequence, and its gradient would grow with the "
            "sequence's length; use 'sequence'"
        )


def _check_kl_gradient(algorithm: Algorithm) -> None:
    kl = algorithm.kl
    if not isinstance(kl, Kl):
        return
    if kl.name == "k1" and kl.place == "loss":
        raise ValueError(
            "algorithm.kl.name = 'k1': in the loss it has no gradient towards the reference; use "
            "'rk3', or algorithm.kl.place = 'reward'"
        )
    if kl.name != KL_IN_THE_REWARD and kl.place == "reward":
        raise ValueError(
            f"algorithm.kl.name = {kl.name!r}: in the reward it has not the divergence's gradient; "
            f"use {KL_IN_THE_REWARD!r}, or algorithm.kl.place = 'loss'"
        )


def _check_something_teaches(algorithm: Algorithm) -> None:
    others = (algorithm.distill, algorithm.kl, algorithm.entropy)
    is_alone = not any(part.needs().every_row for part in others)
    if isinstance(algorithm.advantage, NoAdvantage) and is_alone:
        raise ValueError(
            "algorithm.advantage.name = 'none': is of teachers, and there is none, so that nothing "
            "would be learned; use another advantage, or algorithm.distill.name = 'advantage' and "
            "a table [teachers.NAME]"
        )


def _check_siblings(algorithm: Algorithm, siblings: int) -> None:
    least, advantage = algorithm.needs.min_siblings, algorithm.advantage
    if siblings >= least:
        if siblings == 1 and isinstance(algorithm.groups, Refill):
            raise ValueError(
                "rollout.samples_per_prompt = 1: algorithm.groups.name = 'refill' wants prompts "
                "whose responses differ, and skips all others; use 2 or more, or groups.name = "
                "'as_sampled'"
            )
        return
    k = getattr(advantage, "k", None)
    if k == least:
        raise ValueError(
            f"algorithm.advantage.k = {k}: there are rollout.samples_per_prompt = {siblings} "
            "siblings to choose from; use at most as many"
        )
    raise ValueError(
        f"rollout.samples_per_prompt = {siblings}: algorithm.advantage.name = {advantage.name!r} "
        f"compares siblings of a prompt; use {least} or more"
    )


def _check_overlong(algorithm: Algorithm, config: "RunConfig") -> None:
    groups, rollout = algorithm.groups, config.rollout
    if groups.truncated == "penalty" and isinstance(algorithm.advantage, PassK):
        raise ValueError(
            "algorithm.groups.truncated = 'penalty': a right response that is long would fall "
            f"below algorithm.advantage.right = {algorithm.advantage.right:g}, and count as "
            "wrong; use 'mask', or another advantage"
        )
    if groups.truncated == "penalty" and rollout.environment != "single_turn":
        raise ValueError(
            "algorithm.groups.truncated = 'penalty': an episode of rollout.environment = "
            f"{rollout.environment!r} has several responses; use 'mask', or let its reward do it"
        )
    if (groups.overlong_buffer or 0) > rollout.max_new_tokens:
        raise ValueError(
            f"algorithm.groups.overlong_buffer = {groups.overlong_buffer}: is longer than "
            f"rollout.max_new_tokens = {rollout.max_new_tokens}; use a part of it"
        )


def _check_solved_groups_are_on_record(algorithm: Algorithm, config: "RunConfig") -> None:
    if not config.prompts.retire_after:
        return
    named = f"prompts.retire_after = {config.prompts.retire_after}"
    if not isinstance(algorithm.groups, Refill):
        raise ValueError(
            f"{named}: algorithm.groups.name = {algorithm.groups.name!r} trains on solved groups, "
            "and keeps no record of them; use 'refill', or leave retire_after out"
        )
    if config.schedule.over_age != "wait":
        raise ValueError(
            f"{named}: with schedule.over_age = {config.schedule.over_age!r} groups count by when "
            "they come; use 'wait', or leave retire_after out"
        )


def _check_split(algorithm: Algorithm, config: "RunConfig") -> None:
    prompts, parts = config.schedule.prompts_per_step, algorithm.mini_batches
    if parts > prompts:
        raise ValueError(
            f"algorithm.mini_batches = {parts}: a batch has schedule.prompts_per_step = {prompts} "
            "prompts; use at most as many"
        )
    if algorithm.waits_for_the_batch and config.actor.advanced.portion_micro_batches:
        name = next(
            (
                f"algorithm.{table}.name = {part.name!r}"
                for table, part in algorithm.parts
                if part.needs().prepass or part.needs().scope == "batch"
            ),
            f"algorithm.mini_batches = {parts}",
        )
        raise ValueError(
            "actor.advanced.portion_micro_batches = "
            f"{config.actor.advanced.portion_micro_batches}: {name} needs "
            "the whole batch before any of it is trained on; remove it"
        )


def _check_lowest_rewards(algorithm: Algorithm, config: "RunConfig") -> None:
    if algorithm.advantage.name != "max_rl":
        return
    if algorithm.groups.truncated == "penalty":
        raise ValueError(
            "algorithm.groups.truncated = 'penalty': lowers a reward of 0, and "
            "algorithm.advantage.name = 'max_rl' takes none below 0; use 'mask', or another "
            "advantage"
        )
    for title, term in config.reward.every_term.items():
        key = f"reward.terms.{title}" if title else "reward"
        if term.weight < 0:
            raise ValueError(
                f"{key}.weight = {term.weight:g}: algorithm.advantage.name = 'max_rl' takes no "
                "reward below 0; use another advantage"
            )


def _check_critic(algorithm: Algorithm, config: "RunConfig") -> None:
    wanted, critic = algorithm.needs.columns.get("ragged/values"), config.critic
    if critic is None:
        if wanted:
            raise ValueError(
                f"{wanted}: needs a critic, which gives states their values; add a table [critic]"
            )
        return
    if not wanted:
        raise ValueError(
            "critic: algorithm.advantage.name = "
            f"{algorithm.advantage.name!r} reads no values of states; use 'gae', or "
            "algorithm.preset = 'ppo', or remove [critic]"
        )
    if critic.warmup_steps >= config.num_steps:
        raise ValueError(
            f"critic.warmup_steps = {critic.warmup_steps}: the policy would stand still in all of "
            f"schedule.num_steps = {config.num_steps}; use fewer"
        )
    if getattr(algorithm.kl, "place", "loss") == "reward":
        raise ValueError(
            "algorithm.kl.place = 'reward': the critic learns the reward without it; use 'loss'"
        )


def _check_teachers(config: "RunConfig") -> None:
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
    _check_media(config)
    _check_pupils(config)


def _check_media(config: "RunConfig") -> None:
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


def _check_pupils(config: "RunConfig") -> None:
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
    hint = nearest(source, known) or f"use {', '.join(known)}"
    return f"there is no prompts.sources.{source}; {hint}"
