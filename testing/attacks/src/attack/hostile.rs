//! The hostile namespace: clients that create, change and delete objects as fast as they may.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::rbac::v1::RoleBinding;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tessera_e2e::inventory::GpuInventory;
use tessera_e2e::objects;

use super::shapes::{FINALIZER, LABEL, Names, Shapes};
use super::{AttackPlan, HOSTILE, Target};
use crate::cluster;

/// The attacker's user name.
const USER: &str = "attacker";

/// Kinds of objects, in the order in which an attacker needs them.
const KINDS: [&str; 4] = ["ResourceClaim", "ResourceClaimTemplate", "Pod", "DeviceClass"];

/// Attempts to remove the attacker's finalizers from objects that others change.
const ATTEMPTS: usize = 100;

type Outcomes = BTreeMap<String, BTreeMap<&'static str, u64>>;

pub(super) struct Hostile {
    /// The attacker's client.
    client: Client,
    administrator: Client,
    plan: AttackPlan,
    shapes: Shapes,
    outcomes: Mutex<Outcomes>,
}

/// Lets the attacker do in its namespace what a user with the role `edit` may.
pub(super) async fn grant_rights(target: &Target) -> anyhow::Result<()> {
    let bindings: Api<RoleBinding> = Api::namespaced(target.client.clone(), HOSTILE);
    let group = "rbac.authorization.k8s.io";
    let binding = json!({
        "metadata": {"name": "attacker"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "edit"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": USER}],
    });
    cluster::create(&bindings, binding).await.context("cannot grant rights to the attacker")?;
    Ok(())
}

impl Hostile {
    pub(super) fn new(
        target: &Target,
        plan: AttackPlan,
        inventory: &GpuInventory,
    ) -> anyhow::Result<Self> {
        let mut config = target.config.clone();
        config.auth_info.impersonate = Some(USER.to_owned());
        let client = if plan.classes { target.client.clone() } else { Client::try_from(config)? };
        Ok(Self {
            client,
            administrator: target.client.clone(),
            plan,
            shapes: Shapes::new(plan.seed, &target.image, inventory),
            outcomes: Mutex::default(),
        })
    }

    /// Attacks until that time.
    pub(super) async fn run(&self, until: Instant) {
        let worker = |number: usize| async move {
            let mut shapes = self.shapes.clone();
            let seed = self.plan.seed.wrapping_mul(1000).wrapping_add(number as u64);
            shapes.random = tessera_e2e::random::Random::new(seed);
            let mut worker =
                Worker { hostile: self, number, created: 0, live: Live::default(), shapes };
            let mut ticks = self
                .plan
                .rate
                .map(|rate| tokio::time::interval(Duration::from_secs(1) / rate.max(1)));
            while Instant::now() < until {
                if let Some(ticks) = &mut ticks {
                    ticks.tick().await;
                }
                worker.act().await;
            }
        };
        join_all((0..self.plan.workers).map(worker)).await;
    }

    /// Returns the number of requests so far.
    pub(super) fn requests(&self) -> u64 {
        self.outcomes().values().flat_map(BTreeMap::values).sum()
    }

    /// Returns the number of requests by verb and kind, and by outcome.
    pub(super) fn outcomes(&self) -> Outcomes {
        self.outcomes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Removes what would keep the namespace from being deleted, and the attacker's classes.
    pub(super) async fn withdraw(&self) -> anyhow::Result<()> {
        let client = &self.administrator;
        let pods = Api::<Pod>::namespaced(client.clone(), HOSTILE);
        release(&pods).await?;
        delete_unstoppable(&pods).await?;
        release(&Api::<ResourceClaim>::namespaced(client.clone(), HOSTILE)).await?;
        release(&Api::<ResourceClaimTemplate>::namespaced(client.clone(), HOSTILE)).await?;
        let classes: Api<DeviceClass> = Api::all(client.clone());
        release(&classes).await?;
        for class in classes.list(&ListParams::default().labels(LABEL)).await? {
            classes.delete(&class.name_any(), &DeleteParams::default()).await?;
        }
        Ok(())
    }

    fn count(&self, request: &str, outcome: &'static str) {
        let mut outcomes = self.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        *outcomes.entry(request.to_owned()).or_default().entry(outcome).or_default() += 1;
    }
}

/// Removes the attacker's finalizer from all objects. Others are not the attacker's to remove.
async fn release<K>(api: &Api<K>) -> anyhow::Result<()>
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    for _ in 0..ATTEMPTS {
        if release_once(api).await? == 0 {
            return Ok(());
        }
    }
    anyhow::bail!("objects changed {ATTEMPTS} times while the attacker's finalizer was removed")
}

/// Deletes pods that the kubelet never stops, without its consent.
///
/// A tenant may create a pod with `nodeName` and a claim template that does not exist. Kubelet 1.37
/// fails to unprepare it ("ResourceClaim not created yet") and tries again for ever. No driver is
/// asked about such a pod.
async fn delete_unstoppable(pods: &Api<Pod>) -> anyhow::Result<()> {
    for pod in pods.list(&ListParams::default()).await?.iter().filter(|pod| lacks_claim(pod)) {
        match pods.delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(error) => return Err(error).context("cannot delete a pod without its claim"),
        }
    }
    Ok(())
}

/// Returns true if a pod is on a node and a claim was never created from one of its templates.
fn lacks_claim(pod: &Pod) -> bool {
    let Some(spec) = pod.spec.as_ref().filter(|spec| spec.node_name.is_some()) else {
        return false;
    };
    let statuses = pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
    let is_created = |entry: &str| statuses.into_iter().flatten().any(|s| s.name == entry);
    spec.resource_claims
        .iter()
        .flatten()
        .any(|entry| entry.resource_claim_template_name.is_some() && !is_created(&entry.name))
}

/// Returns the number of objects that were changed meanwhile, and are to be read again.
async fn release_once<K>(api: &Api<K>) -> anyhow::Result<usize>
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let mut changed = 0;
    for object in api.list(&ListParams::default()).await? {
        let is_other = |finalizer: &&String| *finalizer != FINALIZER;
        let others: Vec<_> = object.finalizers().iter().filter(is_other).collect();
        if others.len() == object.finalizers().len() {
            continue;
        }
        let version = object.resource_version();
        let patch = json!({"metadata": {"finalizers": others, "resourceVersion": version}});
        match api.patch(&object.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(kube::Error::Api(status)) if status.is_conflict() => changed += 1,
            Err(error) => return Err(error).context("cannot remove the attacker's finalizer"),
        }
    }
    Ok(changed)
}

/// Names of a worker's objects by kind.
type Live = BTreeMap<&'static str, Vec<String>>;

/// One client of the attacker.
struct Worker<'a> {
    hostile: &'a Hostile,
    number: usize,
    created: usize,
    live: Live,
    shapes: Shapes,
}

impl Worker<'_> {
    /// Makes one random request.
    async fn act(&mut self) {
        let kind = match self.shapes.random.between(0, 99) {
            0..30 => KINDS[0],
            30..45 => KINDS[1],
            45..97 => KINDS[2],
            _ if self.hostile.plan.classes => KINDS[3],
            _ => KINDS[2],
        };
        let count = self.live.get(kind).map_or(0, Vec::len);
        match self.shapes.random.between(0, 99) {
            _ if count == 0 => self.create(kind).await,
            0..50 if count < self.hostile.plan.objects => self.create(kind).await,
            50..75 => self.change(kind).await,
            _ => self.delete(kind).await,
        }
    }

    async fn create(&mut self, kind: &'static str) {
        self.created += 1;
        let name = format!("w{}-{}", self.number, self.created);
        let object = self.object(kind, &name);
        let Ok(object) = objects::complete(&with_kind(object, kind), 0)
            .map_err(anyhow::Error::from)
            .and_then(|object| Ok(serde_json::from_value::<DynamicObject>(object)?))
        else {
            return self.hostile.count(&format!("create {kind}"), "invalid");
        };
        let created = self.api(kind).create(&PostParams::default(), &object).await;
        if self.outcome("create", kind, created.map(drop)) {
            self.live.entry(kind).or_default().push(name);
        }
    }

    fn object(&mut self, kind: &str, name: &str) -> Value {
        let of = |kind: &str| self.live.get(kind).map_or(&[][..], Vec::as_slice);
        let names = Names {
            claims: of("ResourceClaim"),
            templates: of("ResourceClaimTemplate"),
            classes: of("DeviceClass"),
        };
        match kind {
            "ResourceClaim" => self.shapes.claim(name, &names),
            "ResourceClaimTemplate" => self.shapes.template(name, &names),
            "Pod" => self.shapes.pod(name, &names),
            _ => self.shapes.class(name),
        }
    }

    async fn change(&mut self, kind: &'static str) {
        let Some(name) = self.any_of(kind) else { return };
        let patch = Patch::Merge(self.shapes.change(kind));
        let changed = self.api(kind).patch(&name, &PatchParams::default(), &patch).await;
        self.outcome("change", kind, changed.map(drop));
    }

    async fn delete(&mut self, kind: &'static str) {
        let Some(name) = self.any_of(kind) else { return };
        self.live.entry(kind).or_default().retain(|other| *other != name);
        let delete = match self.shapes.random.between(0, 3) {
            0 => DeleteParams::default().grace_period(0),
            1 => DeleteParams::foreground(),
            _ => DeleteParams::default(),
        };
        let deleted = self.api(kind).delete(&name, &delete).await;
        self.outcome("delete", kind, deleted.map(drop));
    }

    fn any_of(&mut self, kind: &str) -> Option<String> {
        let live = self.live.get(kind).filter(|live| !live.is_empty())?;
        Some(self.shapes.random.one_of(live).clone())
    }

    fn api(&self, kind: &str) -> Api<DynamicObject> {
        objects::api(&self.hostile.client, kind, HOSTILE)
            .expect("invariant: all kinds are those of scenario files")
    }

    /// Counts the outcome of a request and returns true if it was accepted.
    fn outcome(&self, verb: &str, kind: &str, result: kube::Result<()>) -> bool {
        let outcome = match &result {
            Ok(()) => "accepted",
            Err(kube::Error::Api(status)) if status.code < 500 => "refused",
            Err(_) => "failed",
        };
        self.hostile.count(&format!("{verb} {kind}"), outcome);
        result.is_ok()
    }
}

fn with_kind(mut object: Value, kind: &str) -> Value {
    object["kind"] = kind.into();
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(node: Option<&str>, entry: &Value, statuses: &Value) -> Pod {
        serde_json::from_value(json!({
            "spec": {"nodeName": node, "containers": [], "resourceClaims": [entry]},
            "status": {"resourceClaimStatuses": statuses},
        }))
        .expect("a pod")
    }

    #[test]
    fn only_pods_on_nodes_without_claims_are_unstoppable() {
        let of_template = json!({"name": "gpu", "resourceClaimTemplateName": "missing"});
        let of_claim = json!({"name": "gpu", "resourceClaimName": "missing"});
        let created = json!([{"name": "gpu", "resourceClaimName": "pod-gpu"}]);
        assert!(lacks_claim(&pod(Some("node"), &of_template, &json!([]))));
        assert!(!lacks_claim(&pod(Some("node"), &of_template, &created)));
        assert!(!lacks_claim(&pod(Some("node"), &of_claim, &json!([]))));
        assert!(!lacks_claim(&pod(None, &of_template, &json!([]))));
    }
}
