"""The controller's right to create pods is confined to verifier pods: each way out, tried."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from llmkube.api.cached import decode_metalnode
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE, VERIFIER_COMMAND
from llmkube.api.spki import SpkiPin
from llmkube.kube.errors import ApiError, Forbidden, Invalid, NotFound
from llmkube.kube.resources import CONFIGMAPS, METALNODES, PODS
from llmkube.rules.checks import CheckInputs, CheckSettings
from llmkube.rules.verifier_pod import PodSettings, render_pod
from llmkube.verifier.policy import AddressPolicy
from tests.conftest import open_client
from tests.support.accounts import create_account, grant
from tests.support.reports import make_certificate
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = pytest.mark.cluster

IMAGE = "ghcr.io/llmkube/llmkube-verifier:v0.1.0"
POLICY = "llmkube-controller-pods"
ClientFor = Callable[[str, str], Awaitable["KubeClient"]]
Pod = dict[str, Any]


def metalnode(namespace: str, uid: str = "8a2f") -> dict[str, Any]:
    tolerations = [{"key": "relay", "operator": "Exists", "effect": "NoSchedule"}]
    return {
        "apiVersion": METALNODES.api_version,
        "kind": METALNODES.kind,
        "metadata": {"name": "studio.example", "namespace": namespace, "uid": uid},
        "spec": {
            "leaseName": "l",
            "serviceAccountName": "s",
            "verifier": {"nodeSelector": {"zone": "relay"}, "tolerations": tolerations},
        },
    }


async def owner_in(admin: KubeClient, namespace: str) -> str:
    """The UID of a MetalNode that exists: a pod of none is soon collected as garbage."""
    body = metalnode(namespace)
    del body["metadata"]["uid"]
    return str((await admin.create(METALNODES, body, namespace))["metadata"]["uid"])


def verifier_pod(name: str, namespace: str, owner: str = "8a2f") -> Pod:
    """The pod that the controller really makes, with everything that a user may ask of it."""
    node = decode_metalnode(json.dumps(metalnode(namespace, owner)).encode())
    inputs = CheckInputs(
        pin=SpkiPin(bytes(32)),
        certificate=make_certificate(),
        port=9443,
        addresses=("100.101.2.3", "192.168.1.20"),
        placement=node.spec.verifier,
    )
    return render_pod(
        node,
        inputs,
        name=name,
        policy=AddressPolicy((), ()),
        checks=CheckSettings(),
        settings=PodSettings(image=IMAGE, pull_secret="registry"),
    )


@pytest.fixture(scope="module")
def ns(shipped: ControlPlane) -> Iterator[str]:
    name = "admission-pods"
    asyncio.run(shipped.kubectl("create", "namespace", name))
    asyncio.run(shipped.kubectl("wait", "--for=create", "-n", name, "sa/default", "--timeout=30s"))
    # What some ways out need to exist, to be refused by nothing but the policy.
    asyncio.run(shipped.kubectl("create", "serviceaccount", "other", "-n", name))
    asyncio.run(shipped.kubectl("apply", "-f", "-", stdin=json.dumps(RUNTIME)))
    asyncio.run(shipped.kubectl("create", "priorityclass", "important", "--value=1000"))
    yield name
    asyncio.run(shipped.kubectl("delete", "namespace", name, "--wait=false"))
    asyncio.run(shipped.kubectl("delete", "priorityclass", "important"))
    asyncio.run(shipped.kubectl("delete", "runtimeclass", RUNTIME["metadata"]["name"]))


@pytest.fixture(scope="module")
def controller_kubeconfig(shipped: ControlPlane, ns: str) -> Any:
    """The controller's account, once the policy binds (a fresh one takes some seconds)."""

    async def bound() -> Any:
        path = await shipped.service_account_kubeconfig(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)
        async with AsyncExitStack() as stack:
            client = await open_client(stack, path)

            async def refused() -> bool:
                pod = verifier_pod("too-early", ns)
                pod["spec"]["hostNetwork"] = True
                try:
                    await client.create(PODS, pod, ns)
                except Forbidden as error:
                    return POLICY in error.message
                with contextlib.suppress(NotFound):  # it has no owner: garbage collection
                    await client.delete(PODS, "too-early", ns, grace_seconds=0)
                return False

            await eventually(refused, "the policy on the controller's pods is in force")
        return path

    return asyncio.run(bound())


@pytest.fixture
async def controller(controller_kubeconfig: Any) -> AsyncIterator[KubeClient]:
    async with AsyncExitStack() as stack:
        yield await open_client(stack, controller_kubeconfig)


RUNTIME: dict[str, Any] = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "runc-root"},
    "handler": "runc-root",
}


# Ways out ---------------------------------------------------------------------------------------
Change = Callable[[Pod], None]


def at(path: str, value: Any) -> Change:
    """Set `a.b.0.c` to a value; `...` removes it."""

    def change(pod: Pod) -> None:
        *parents, last = path.split(".")
        target: Any = pod
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
        if value is ...:
            del target[last]
        elif isinstance(target, list):
            target[int(last)] = value
        else:
            target[last] = value

    return change


def both(*changes: Change) -> Change:
    def change(pod: Pod) -> None:
        for one in changes:
            one(pod)

    return change


def key(part: str, name: str, value: str) -> Change:
    """A label or annotation, whose key has dots."""
    return lambda pod: pod["metadata"][part].__setitem__(name, value)


C = "spec.containers.0"
SECURITY = f"{C}.securityContext"
SECRET = {"secretKeyRef": {"name": "s", "key": "k"}}
CONTAINER = {"name": "more", "image": IMAGE}
EXEC = {"exec": {"command": ["sh"]}}
TOKEN = {"serviceAccountToken": {"path": "token"}}
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "u"}

# (id, change, a word of the message)
WAYS_OUT: list[tuple[str, Change, str]] = [
    ("no managed-by label", key("labels", "app.kubernetes.io/managed-by", "helm"), "labelled"),
    ("another component", key("labels", "app.kubernetes.io/component", "relay"), "labelled"),
    ("no labels at all", at("metadata.labels", ...), "labelled"),
    ("a label that a Service selects", key("labels", "app", "postgres"), "no labels but"),
    (
        "a name label that a Service selects",
        key("labels", "app.kubernetes.io/name", "postgres"),
        "no labels but",
    ),
    (
        "an annotation for Multus",
        key("annotations", "k8s.v1.cni.cncf.io/networks", "host-net"),
        "no annotations but",
    ),
    (
        "an annotation for Kata",
        key("annotations", "io.katacontainers.config.hypervisor.path", "/bin/sh"),
        "no annotations but",
    ),
    (
        "an annotation for AppArmor",
        key("annotations", "container.apparmor.security.beta.kubernetes.io/verifier", "unconfined"),
        "",
    ),
    ("no owner", at("metadata.ownerReferences", ...), "owned by one MetalNode"),
    ("another kind of owner", at("metadata.ownerReferences", [OWNER]), "owned by one MetalNode"),
    (
        "a MetalNode of another group",
        at("metadata.ownerReferences.0.apiVersion", "evil.example/v1"),
        "owned by one MetalNode",
    ),
    (
        "two owners",
        lambda pod: pod["metadata"]["ownerReferences"].append(OWNER),
        "owned by one MetalNode",
    ),
    (
        "an owner whose deletion it blocks",
        at("metadata.ownerReferences.0.blockOwnerDeletion", True),
        "owned by one MetalNode",
    ),
    ("a finalizer", at("metadata.finalizers", ["example.com/stay"]), "finalizer"),
    (
        "a second container",
        lambda pod: pod["spec"]["containers"].append(CONTAINER),
        "one container",
    ),
    ("an init container", at("spec.initContainers", [CONTAINER]), "one container"),
    (
        "a sidecar",
        at("spec.initContainers", [{**CONTAINER, "restartPolicy": "Always"}]),
        "one container",
    ),
    ("another image", at(f"{C}.image", "busybox"), "ConfigMap llmkube-verifier"),
    ("the image with another tag", at(f"{C}.image", IMAGE + "0"), "ConfigMap llmkube-verifier"),
    ("no image", at(f"{C}.image", ...), ""),
    ("the image's own command", at(f"{C}.command", ...), "command"),
    ("a shell", at(f"{C}.command", ["sh", "-c", "id"]), "command"),
    ("another module", at(f"{C}.command", ["python", "-m", "http.server"]), "command"),
    ("code", at(f"{C}.command", ["python", "-c", "import llmkube.verifier"]), "command"),
    ("an argument in the command", at(f"{C}.command", [*VERIFIER_COMMAND, "-x"]), "command"),
    ("arguments", at(f"{C}.args", ["-x"]), "command"),
    ("another working directory", at(f"{C}.workingDir", "/tmp"), "command"),
    ("a postStart hook", at(f"{C}.lifecycle", {"postStart": EXEC}), "hooks"),
    (
        "a preStop hook that calls a URL",
        at(f"{C}.lifecycle", {"preStop": {"httpGet": {"host": "169.254.169.254", "port": 80}}}),
        "hooks",
    ),
    ("a liveness probe that runs a command", at(f"{C}.livenessProbe", EXEC), "probes"),
    (
        "a readiness probe that calls a host",
        at(f"{C}.readinessProbe", {"httpGet": {"host": "10.0.0.1", "port": 80}}),
        "probes",
    ),
    ("a startup probe", at(f"{C}.startupProbe", {"tcpSocket": {"port": 22}}), "probes"),
    ("a terminal", at(f"{C}.tty", True), "terminal"),
    ("an open stdin", at(f"{C}.stdin", True), "terminal"),
    ("another termination log", at(f"{C}.terminationMessagePath", "/etc/passwd"), "terminal"),
    (
        "a Secret as environment",
        at(f"{C}.env.0", {"name": "LLMKUBE_X", "valueFrom": SECRET}),
        "env",
    ),
    (
        "a ConfigMap as environment",
        at(
            f"{C}.env.0",
            {"name": "LLMKUBE_X", "valueFrom": {"configMapKeyRef": {"name": "s", "key": "k"}}},
        ),
        "environment",
    ),
    (
        "the downward API as environment",
        at(
            f"{C}.env.0",
            {"name": "LLMKUBE_X", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        ),
        "environment",
    ),
    ("a whole Secret", at(f"{C}.envFrom", [{"secretRef": {"name": "s"}}]), "environment"),
    ("a whole ConfigMap", at(f"{C}.envFrom", [{"configMapRef": {"name": "s"}}]), "environment"),
    (
        "a variable that makes Python run code",
        at(f"{C}.env.0", {"name": "PYTHONWARNINGS", "value": "all:0:antigravity.x:0:0"}),
        "environment",
    ),
    ("a library", at(f"{C}.env.0", {"name": "LD_PRELOAD", "value": "/x.so"}), "environment"),
    ("a host path", at("spec.volumes", [{"name": "v", "hostPath": {"path": "/"}}]), "volumes"),
    ("a Secret", at("spec.volumes", [{"name": "v", "secret": {"secretName": "s"}}]), "volumes"),
    ("an empty folder", at("spec.volumes", [{"name": "v", "emptyDir": {}}]), "volumes"),
    (
        "a projected token",
        at("spec.volumes", [{"name": "v", "projected": {"sources": [TOKEN]}}]),
        "volumes",
    ),
    (
        "an image as a volume",
        at("spec.volumes", [{"name": "v", "image": {"reference": "busybox"}}]),
        "volumes",
    ),
    (
        "somebody's claim",
        at("spec.volumes", [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]),
        "volumes",
    ),
    (
        "a mounted volume",
        both(
            at("spec.volumes", [{"name": "v", "emptyDir": {}}]),
            at(f"{C}.volumeMounts", [{"name": "v", "mountPath": "/v"}]),
        ),
        "volumes",
    ),
    ("the account's token", at("spec.automountServiceAccountToken", True), "acts for nobody"),
    ("the token by default", at("spec.automountServiceAccountToken", ...), "acts for nobody"),
    ("another account", at("spec.serviceAccountName", "other"), "acts for nobody"),
    ("another account, old name", at("spec.serviceAccount", "other"), "acts for nobody"),
    ("a host port", at(f"{C}.ports", [{"containerPort": 80, "hostPort": 80}]), "no ports"),
    ("a port", at(f"{C}.ports", [{"containerPort": 80}]), "no ports"),
    (
        "a GPU",
        at(f"{C}.resources.limits", {"nvidia.com/gpu": "1", "cpu": "1", "memory": "64Mi"}),
        "no devices",
    ),
    (
        "a claimed device",
        at("spec.resourceClaims", [{"name": "d", "resourceClaimName": "d"}]),
        "no devices",
    ),
    ("a node of its choice", at("spec.nodeName", "control-plane"), "placed by the scheduler"),
    (
        "an affinity",
        at(
            "spec.affinity",
            {
                "podAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}
                    ]
                }
            },
        ),
        "placed by the scheduler",
    ),
    ("a system priority", at("spec.priorityClassName", "system-node-critical"), "preempts nobody"),
    ("somebody's priority", at("spec.priorityClassName", "important"), "preempts nobody"),
    ("the host's network", at("spec.hostNetwork", True), "namespace of the host"),
    ("the host's processes", at("spec.hostPID", True), "namespace of the host"),
    ("the host's IPC", at("spec.hostIPC", True), "namespace of the host"),
    ("shared processes", at("spec.shareProcessNamespace", True), "namespace of the host"),
    (
        "names of its own",
        at("spec.hostAliases", [{"ip": "10.0.0.1", "hostnames": ["api"]}]),
        "namespace of the host",
    ),
    ("another runtime", at("spec.runtimeClassName", "runc-root"), "runtime"),
    (
        "Windows",
        both(
            at("spec.os", {"name": "windows"}),
            at("spec.securityContext", {"runAsNonRoot": True}),
            at(SECURITY, {}),
        ),
        "runtime",
    ),
    ("restarts", at("spec.restartPolicy", "Always"), "a verifier pod ends"),
    ("restarts by default", at("spec.restartPolicy", ...), "a verifier pod ends"),
    ("no deadline", at("spec.activeDeadlineSeconds", ...), "a verifier pod ends"),
    ("root is not excluded", at("spec.securityContext.runAsNonRoot", ...), "restricted"),
    ("root", at("spec.securityContext.runAsUser", 0), "restricted"),
    ("no seccomp", at("spec.securityContext.seccompProfile", {"type": "Unconfined"}), "restricted"),
    ("no word on seccomp", at("spec.securityContext.seccompProfile", ...), "restricted"),
    (
        "no AppArmor",
        at("spec.securityContext.appArmorProfile", {"type": "Unconfined"}),
        "restricted",
    ),
    (
        "another SELinux type",
        at("spec.securityContext.seLinuxOptions", {"type": "spc_t"}),
        "restricted",
    ),
    (
        "a Windows user",
        at("spec.securityContext.windowsOptions", {"runAsUserName": "ContainerAdministrator"}),
        "restricted",
    ),
    ("a further group", at("spec.securityContext.supplementalGroups", [0]), "restricted"),
    (
        "a sysctl",
        at("spec.securityContext.sysctls", [{"name": "kernel.shm_rmid_forced", "value": "1"}]),
        "restricted",
    ),
    (
        "a HostProcess",
        both(
            at("spec.securityContext.windowsOptions", {"hostProcess": True}),
            at("spec.hostNetwork", True),
        ),
        "namespace of the host",
    ),
    ("no security context", at("spec.securityContext", ...), "restricted"),
    (
        "privileged",
        both(at(f"{SECURITY}.privileged", True), at(f"{SECURITY}.allowPrivilegeEscalation", True)),
        "unprivileged",
    ),
    ("escalation", at(f"{SECURITY}.allowPrivilegeEscalation", True), "unprivileged"),
    ("escalation by default", at(f"{SECURITY}.allowPrivilegeEscalation", ...), "unprivileged"),
    ("a writable root", at(f"{SECURITY}.readOnlyRootFilesystem", False), "read-only root"),
    ("a writable root by default", at(f"{SECURITY}.readOnlyRootFilesystem", ...), "read-only"),
    ("root in the container", at(f"{SECURITY}.runAsUser", 0), "not root"),
    ("maybe root in the container", at(f"{SECURITY}.runAsNonRoot", False), "not root"),
    ("a capability", at(f"{SECURITY}.capabilities.add", ["NET_RAW"]), "capabilities"),
    ("capabilities kept", at(f"{SECURITY}.capabilities.drop", ["CHOWN"]), "capabilities"),
    ("capabilities by default", at(f"{SECURITY}.capabilities", ...), "capabilities"),
    (
        "an unmasked /proc",
        both(at(f"{SECURITY}.procMount", "Unmasked"), at("spec.hostUsers", False)),
        "profiles",
    ),
    (
        "no seccomp in the container",
        at(f"{SECURITY}.seccompProfile", {"type": "Unconfined"}),
        "profiles",
    ),
    (
        "no AppArmor in the container",
        at(f"{SECURITY}.appArmorProfile", {"type": "Unconfined"}),
        "profiles",
    ),
    (
        "another SELinux type in the container",
        at(f"{SECURITY}.seLinuxOptions", {"type": "spc_t"}),
        "profiles",
    ),
    ("no container security context", at(SECURITY, ...), "unprivileged"),
]


@pytest.mark.parametrize(
    ("change", "word"), [pytest.param(change, word, id=what) for what, change, word in WAYS_OUT]
)
async def test_refused(
    controller: KubeClient, ns: str, unique: Callable[[str], str], change: Change, word: str
) -> None:
    pod = verifier_pod(unique("out"), ns)
    change(pod)
    with pytest.raises((Forbidden, Invalid)) as caught:
        await controller.create(PODS, pod, ns)
    if word:  # without one, it is enough that the API server itself refuses
        assert POLICY in caught.value.message
        assert word in caught.value.message


async def test_a_namespace_of_its_own_choice_makes_no_difference(
    controller: KubeClient, unique: Callable[[str], str]
) -> None:
    pod = verifier_pod(unique("out"), "kube-system")
    pod["spec"]["hostPID"] = True
    with pytest.raises(Forbidden, match=POLICY):
        await controller.create(PODS, pod, "kube-system")


async def test_a_controller_that_is_installed_elsewhere_is_confined_too(
    admin: KubeClient, client_for: ClientFor, controller: KubeClient, namespace: str
) -> None:
    """kustomize's `namespace:` moves the account, and does not reach into the policy."""
    await create_account(admin, namespace, CONTROLLER_ACCOUNT)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}]
    await grant(admin, namespace, CONTROLLER_ACCOUNT, rules)
    moved = await client_for(namespace, CONTROLLER_ACCOUNT)

    async def confined() -> bool:
        with pytest.raises(Forbidden) as caught:  # at first for want of the right
            await moved.create(PODS, foreign_pod("by-a-copy"), namespace)
        return POLICY in caught.value.message

    await eventually(confined, "the policy is what refuses it")


# What it must let pass --------------------------------------------------------------------------
PASSES: list[tuple[str, Change]] = [
    ("the pod as the controller makes it", lambda pod: None),
    ("without placement", both(at("spec.nodeSelector", ...), at("spec.tolerations", ...))),
    ("without a pull secret", at("spec.imagePullSecrets", ...)),
    ("always pulled", at(f"{C}.imagePullPolicy", "Always")),
    ("never pulled", at(f"{C}.imagePullPolicy", "Never")),
    (
        "a webhook's annotation, where the ConfigMap names it",
        key("annotations", "kubernetes.io/limit-ranger", "LimitRanger plugin set: …"),
    ),
    ("a second literal", lambda pod: pod["spec"]["containers"][0]["env"].append(LITERAL)),
]
LITERAL = {"name": "LLMKUBE_TERMINATION_LOG", "value": "/dev/termination-log"}


@pytest.mark.parametrize("change", [pytest.param(c, id=what) for what, c in PASSES])
async def test_let_pass_and_deleted_again(
    admin: KubeClient, controller: KubeClient, namespace: str, change: Change
) -> None:
    pod = verifier_pod("pass", namespace, await owner_in(admin, namespace))
    change(pod)
    created = await controller.create(PODS, pod, namespace)
    assert created["spec"]["containers"][0]["image"] == IMAGE
    await controller.delete(PODS, "pass", namespace, grace_seconds=0)


def foreign_pod(name: str) -> Pod:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "busybox"}], "hostPID": True},
    }


async def test_others_are_none_of_its_business(
    admin: KubeClient, client_for: ClientFor, shipped: ControlPlane, namespace: str
) -> None:
    await admin.create(PODS, foreign_pod("by-admin"), namespace)
    await create_account(admin, namespace, "deployer")
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete"]}]
    await grant(admin, namespace, "deployer", rules)
    deployer = await client_for(namespace, "deployer")
    await deployer.create(PODS, foreign_pod("by-deployer"), namespace)
    await deployer.delete(PODS, "by-deployer", namespace, grace_seconds=0)


async def test_it_deletes_no_pod_but_verifiers(
    admin: KubeClient, controller: KubeClient, namespace: str
) -> None:
    await admin.create(PODS, foreign_pod("database"), namespace)
    with pytest.raises(Forbidden, match="may touch only pods labelled"):
        await controller.delete(PODS, "database", namespace)
    await admin.get(PODS, "database", namespace)


async def test_nothing_else_about_pods_even_if_rbac_were_wider(
    admin: KubeClient, controller: KubeClient, shipped: ControlPlane, namespace: str
) -> None:
    """RBAC gives none of these; if somebody widens it, the policy still stands."""
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    await grant(admin, namespace, CONTROLLER_ACCOUNT, rules, of=SYSTEM_NAMESPACE)
    pod = verifier_pod("victim", namespace, await owner_in(admin, namespace))
    await controller.create(PODS, pod, namespace)
    nothing_else = "may create and delete verifier pods, and nothing else"

    async def refused(attempt: Callable[[], Awaitable[Any]]) -> bool:
        try:
            await attempt()
        except ApiError as error:
            return nothing_else in error.message  # RBAC's own refusal: not bound yet
        return False

    label = {"metadata": {"labels": {"app": "postgres"}}}
    image = [{"op": "replace", "path": "/spec/containers/0/image", "value": "busybox"}]
    debug = {"spec": {"ephemeralContainers": [{"name": "d", "image": "busybox"}]}}
    done = {"status": {"phase": "Succeeded"}}

    def patch(body: dict[str, Any], subresource: str | None = None) -> Awaitable[Any]:
        return controller.merge_patch(PODS, "victim", namespace, body, subresource=subresource)

    await eventually(lambda: refused(lambda: patch(label)), "a label cannot be changed")
    assert await refused(lambda: controller.json_patch(PODS, "victim", namespace, image))
    for what, body, subresource in (
        ("it gets no ephemeral container", debug, "ephemeralcontainers"),
        ("its status cannot be forged", done, "status"),
    ):
        assert await refused(lambda b=body, s=subresource: patch(b, s)), what  # type: ignore[misc]
    path = await shipped.service_account_kubeconfig(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)
    for verb in (
        ("exec", "victim", "--", "id"),
        ("attach", "victim"),
        ("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/victim/proxy/"),
    ):
        result = await shipped.kubectl("-n", namespace, *verb, kubeconfig=path, check=False)
        assert result.returncode != 0
        assert POLICY in result.stderr, verb
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "victim"}}
    for subresource, body in (
        ("eviction", eviction),
        (
            "binding",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": "victim"},
                "target": {"kind": "Node", "name": "control-plane"},
            },
        ),
    ):
        raw = f"/api/v1/namespaces/{namespace}/pods/victim/{subresource}"
        result = await shipped.kubectl(
            "create", "--raw", raw, "-f", "-", stdin=json.dumps(body), kubeconfig=path, check=False
        )
        assert POLICY in result.stderr, subresource


async def test_without_its_parameters_it_refuses_everything(
    admin: KubeClient, controller: KubeClient, ns: str, unique: Callable[[str], str]
) -> None:
    """A missing ConfigMap, or one without image, must not open the door."""
    original = await admin.get(CONFIGMAPS, "llmkube-verifier", SYSTEM_NAMESPACE)

    async def refused() -> bool:
        pod = verifier_pod(unique("params"), ns)
        try:
            await controller.create(PODS, pod, ns)
        except (Forbidden, Invalid) as error:  # 422 if the parameters are missing
            return POLICY in error.message
        return False

    restored = copy.deepcopy(original)
    for field in ("resourceVersion", "uid", "managedFields", "creationTimestamp"):
        restored["metadata"].pop(field, None)
    try:
        no_image = {"data": {"image": None}}
        await admin.merge_patch(CONFIGMAPS, "llmkube-verifier", SYSTEM_NAMESPACE, no_image)
        await eventually(refused, "no image named: no pod")
        await admin.delete(CONFIGMAPS, "llmkube-verifier", SYSTEM_NAMESPACE)
        await eventually(refused, "no parameters: no pod")
    finally:
        restored["metadata"]["namespace"] = SYSTEM_NAMESPACE
        await admin.apply(CONFIGMAPS, restored, field_manager="kubectl")

    async def passes() -> bool:
        return not await refused()

    await eventually(passes, "with the parameters back, verifier pods pass")
