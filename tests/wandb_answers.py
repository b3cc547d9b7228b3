"""What the stand-in W&B server answers to GraphQL, for clients of 0.31."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from tests.wandb_server import Run, Sweep, WandbServer

Json = dict[str, Any]


def answer(server: WandbServer, query: str, variables: Json) -> Json:
    """The `data` of the response; an empty one to what is not known."""
    found = re.search(r"(?:query|mutation)\s+(\w+)", query)
    operation = found[1] if found else "viewer"
    server.operations.append(operation)
    if operation in ANSWERS:
        return ANSWERS[operation](server, variables)
    if operation not in FIXED and "viewer" in query:
        operation = "Viewer"  # clients ask it under several names
    if operation not in FIXED:
        server.unknown.append(" ".join(query.split()) + " " + json.dumps(variables))
    return FIXED.get(operation, {})


def grid_or_random(sweep: Sweep, n: int) -> Json | None:
    """The n-th arguments: of the grid, or drawn; None where the grid has ended."""
    parameters = sweep.config["parameters"]
    if sweep.config["method"] == "grid":
        values = [p.get("values", [p.get("value")]) for p in parameters.values()]
        combinations = list(itertools.product(*values))
        if n >= len(combinations):
            return None
        return dict(zip(parameters, combinations[n], strict=True))
    rng = random.Random(n)
    return {key: _draw(rng, parameter) for key, parameter in parameters.items()}


def _draw(rng: random.Random, parameter: Json) -> Any:
    if "value" in parameter:
        return parameter["value"]
    if "values" in parameter:
        return rng.choice(parameter["values"])
    return rng.uniform(parameter["min"], parameter["max"])


def _project(variables: Json) -> Json:
    entity = variables.get("entityName") or variables.get("entity") or "local"
    name = variables.get("projectName") or variables.get("project") or "p"
    owner = {"id": "E1", "name": entity}
    return {"id": "P1", "name": name, "entityName": entity, "entity": owner}


USER = {
    **dict.fromkeys(("entity", "username", "name"), "local"),
    **{"id": "U1", "email": "local@localhost", "admin": False, "flags": "{}"},
    "teams": {"edges": [{"node": {"name": "local"}}]},
    "apiKeys": {"edges": []},
}
FIXED: dict[str, Json] = {
    "Viewer": {"viewer": USER},
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
    "OrganizationCoreWeaveOrganizationID": {
        "entity": {"organization": {"coreWeaveOrganizationId": None}}
    },
}


# ---- runs ----------------------------------------------------------------------------


def _upsert_run(server: WandbServer, variables: Json) -> Json:
    is_new = variables["name"] not in server.runs
    run = server.run(variables["name"])
    if variables.get("config"):
        run.raw_config = json.loads(variables["config"])
    run.sweep = variables.get("sweep") or run.sweep
    run.fields.update({k: v for k, v in variables.items() if v is not None})
    bucket = {
        "id": "B" + run.name,
        "name": run.name,
        "displayName": variables.get("displayName") or run.name,
        "description": "",
        "config": json.dumps(run.raw_config),
        "sweepName": run.sweep,
        "project": _project(variables),
        # More than 0 is for forks: `wandb sync` sends all of a run that was uploaded in
        # part, from line 0 on, and W&B says that this is how to complete it.
        "historyLineCount": 0,
    }
    return {"upsertBucket": {"inserted": is_new, "bucket": bucket}}


def _resume_status(server: WandbServer, variables: Json) -> Json:
    run = server.runs.get(variables["name"])
    bucket = None if run is None else _bucket(run)
    return {"model": {**_project(variables), "bucket": bucket}}


def _bucket(run: Run) -> Json:
    """What a client needs to go on with a run."""
    last = run.history[-1:]
    return {
        "id": "B" + run.name,
        "name": run.name,
        "displayName": run.name,
        "summaryMetrics": json.dumps(run.summary),
        "logLineCount": len(run.logs),
        "historyLineCount": len(run.rows),
        "eventsLineCount": 0,
        "historyTail": json.dumps([json.dumps(row) for row in last]),
        "eventsTail": "[]",
        "config": json.dumps(run.raw_config),
        "tags": run.tags,
        "notes": run.fields.get("notes") or "",
        "wandbConfig": json.dumps({"t": 1}),
    }


def _run_files(server: WandbServer, variables: Json) -> Json:
    base = f"{server.base_url}/upload/{variables['run']}"
    files = [{"name": f, "uploadUrl": f"{base}/{f}"} for f in variables["files"]]
    return {"createRunFiles": {"runID": "B", "uploadHeaders": [], "files": files}}


# ---- artifacts -----------------------------------------------------------------------


def _artifact_type(server: WandbServer, variables: Json) -> Json:
    """Of an artifact of that name: there is none."""
    return {"project": {**_project(variables), "artifact": None}}


def _create_artifact(server: WandbServer, variables: Json) -> Json:
    asked = variables["input"]
    name = f"A{len(server.artifacts)}"
    server.artifacts[name] = {
        "name": asked["artifactCollectionName"],
        "type": asked["artifactTypeName"],
        "run": asked.get("runName"),
        "aliases": [alias["alias"] for alias in asked.get("aliases") or []],
        "committed": False,
        "files": {},
    }
    artifact = {"artifactSequence": {"latestArtifact": None}}
    return {
        "createArtifact": {"artifact": {"id": name, "state": "PENDING", **artifact}}
    }


def _create_manifest(server: WandbServer, variables: Json) -> Json:
    name = variables["artifactID"]
    url = f"{server.base_url}/upload/{name}/{variables['name']}"
    file = {"id": "F1", "uploadUrl": url, "uploadHeaders": []}
    manifest = {"id": f"M{name}", "file": file}
    return {"createArtifactManifest": {"artifactManifest": manifest}}


def _artifact_files(server: WandbServer, variables: Json) -> Json:
    edges = []
    for file in variables["input"]["artifactFiles"]:
        name = file["artifactID"]
        node = {
            "storagePath": f"{name}/{file['name']}",
            "uploadUrl": f"{server.base_url}/upload/{name}/{file['name']}",
            "uploadHeaders": [],
            "uploadMultipartUrls": None,
            "artifact": {"id": name},
        }
        edges.append({"node": node})
    return {"createArtifactFiles": {"files": {"edges": edges}}}


def _commit_artifact(server: WandbServer, variables: Json) -> Json:
    name = variables["artifactID"]
    server.artifacts[name]["committed"] = True
    return {"commitArtifact": {"artifact": {"id": name, "digest": "d"}}}


# ---- what `wandb.Api()` reads --------------------------------------------------------


def _runs(server: WandbServer, variables: Json) -> Json:
    """All runs, or those of one sweep, in one page."""
    filters = json.loads(variables.get("filters") or "{}")
    terms = [filters, *filters.get("$and", [])]
    wanted = {term["sweep"] for term in terms if "sweep" in term}
    runs = [r for r in server.runs.values() if not wanted or r.sweep in wanted]
    edges = [{"node": _run_node(run), "cursor": run.name} for run in runs]
    pages = {"endCursor": None, "hasNextPage": False}
    listing = {"edges": edges, "pageInfo": pages}
    about = {"internalId": "1", "runCount": len(runs), "readOnly": False}
    return {"project": {**_project(variables), **about, "runs": listing}}


def _run_node(run: Run) -> Json:
    return {
        "projectId": "1",
        "id": "B" + run.name,
        "tags": run.tags,
        "name": run.name,
        "displayName": run.fields.get("displayName") or run.name,
        "sweepName": run.sweep,
        "state": run.state,
        "group": run.group,
        "jobType": run.job_type,
        "config": json.dumps(run.raw_config),
        "summaryMetrics": json.dumps(run.summary),
        "systemMetrics": "{}",
        "historyLineCount": len(run.rows),
        "historyKeys": {"lastStep": len(run.rows) - 1, "keys": {}},
        "commit": None,
        "readOnly": False,
        "createdAt": "2026-01-01T00:00:00",
        "heartbeatAt": "2026-01-01T00:00:00",
        "description": "",
        "notes": "",
        "user": {"name": "local", "username": "local"},
    }


# ---- sweeps --------------------------------------------------------------------------


def _upsert_sweep(server: WandbServer, variables: Json) -> Json:
    from tests.wandb_server import Sweep

    raw, name = variables["config"], f"sw{len(server.sweeps)}"
    server.sweeps[name] = Sweep(name=name, raw=raw, config=yaml.safe_load(raw))
    sweep = {"id": name, "name": name, "config": raw, "state": "RUNNING"}
    sweep["project"] = _project(variables)
    return {"upsertSweep": {"sweep": sweep, "configValidationWarnings": []}}


def _sweep(server: WandbServer, variables: Json) -> Json:
    name = variables.get("sweep") or variables.get("name") or next(iter(server.sweeps))
    sweep = server.sweeps[name]
    unknown = ("displayName", "bestLoss", "runCountExpected", "description")
    unknown += ("heartbeatAt", "updatedAt", "controller", "scheduler")
    about = {
        "__typename": "Sweep",
        "id": name,
        "name": name,
        "runCount": sweep.num_proposed,
        "method": sweep.config["method"],
        "state": sweep.state,
        "config": sweep.raw,
        "createdAt": "2026-01-01T00:00:00",
        "earlyStopJobRunning": False,
        "runs": {"edges": []},
        **dict.fromkeys(unknown),
    }
    return {"project": {**_project(variables), "sweep": about}}


def _create_agent(server: WandbServer, variables: Json) -> Json:
    from tests.wandb_server import Agent

    name = f"ag{len(server.agents)}"
    server.agents[name] = Agent(sweep=variables["sweep"])
    return {"createAgent": {"agent": {"id": name}}}


def _heartbeat(server: WandbServer, variables: Json) -> Json:
    agent = server.agents[variables["id"]]
    alive = set(json.loads(variables["runState"] or "{}"))
    for name in agent.runs:
        server.run(name).is_lost = name not in alive
    commands = [*_stops(server, alive)]
    if not alive:  # one run at a time for each agent
        commands.append(_next_run(server, agent))
    reply = {"agent": {"id": variables["id"]}, "commands": json.dumps(commands)}
    return {"agentHeartbeat": reply}


def _stops(server: WandbServer, alive: set[str]) -> list[Json]:
    for name in alive:
        if server.should_stop(server.run(name)):
            server.to_stop.add(name)
    return [{"type": "stop", "run_id": name} for name in server.to_stop & alive]


def _next_run(server: WandbServer, agent: Any) -> Json:
    sweep = server.sweeps[agent.sweep]
    is_over = sweep.num_proposed >= sweep.config.get("run_cap", float("inf"))
    arguments = None if is_over else server.suggest(sweep, sweep.num_proposed)
    if arguments is None:
        sweep.state = "FINISHED"
        return {"type": "exit"}
    name = f"{sweep.name}r{sweep.num_proposed}"
    sweep.num_proposed += 1
    agent.runs.add(name)
    return {
        "type": "run",
        "run_id": name,
        "program": sweep.config.get("program"),
        "args": {key: {"value": value} for key, value in arguments.items()},
    }


ANSWERS: dict[str, Callable[[Any, Json], Json]] = {
    "UpsertBucket": _upsert_run,
    "RunResumeStatus": _resume_status,
    "CreateRunFiles": _run_files,
    "Runs": _runs,
    "UpsertSweep": _upsert_sweep,
    "SweepWithRuns": _sweep,
    "GetSweep": _sweep,
    "CreateAgent": _create_agent,
    "Heartbeat": _heartbeat,
    "ArtifactType": _artifact_type,
    "CreateArtifact": _create_artifact,
    "CreateArtifactManifest": _create_manifest,
    "CreateArtifactFiles": _artifact_files,
    "CommitArtifact": _commit_artifact,
}
