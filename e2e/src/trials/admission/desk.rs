//! Requests to the API server by whoever, and what they were to come to.

use std::cell::RefCell;
use std::fmt;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::Request;
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::trials::bench::{Bench, PATIENCE};
use crate::wait::{self, Verdict};

/// Somebody whom the administrator impersonates.
#[derive(Clone, Copy)]
pub(super) struct User {
    name: &'static str,
    group: Option<&'static str>,
    /// What its token is bound to.
    node: Option<&'static str>,
}

const fn user(name: &'static str) -> User {
    User { name, group: None, node: None }
}

/// Between questions whether a right is in force.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// A node that there is not: what the driver says about it disturbs nobody.
pub(super) const NODE: &str = "policies-node";

pub(super) const ADMINISTRATOR: User =
    User { name: "root", group: Some("system:masters"), node: None };
/// May do in the namespace what the cluster role `edit` allows.
pub(super) const EDITOR: User = user("policies-editor");
pub(super) const CONTROLLER: User = user("system:serviceaccount:tessera-system:tessera-controller");
pub(super) const DRIVER: User = User {
    name: "system:serviceaccount:tessera-system:tessera-driver",
    group: None,
    node: Some(NODE),
};
pub(super) const DRIVER_WITHOUT_NODE: User = User { node: None, ..DRIVER };
pub(super) const DRIVER_ELSEWHERE: User = User { node: Some("elsewhere"), ..DRIVER };
pub(super) const SCHEDULER: User = user("system:kube-scheduler");
/// Where its controllers have no accounts of their own, it has whatever rights it was given: here,
/// all.
pub(super) const CONTROLLER_MANAGER: User =
    User { name: "system:kube-controller-manager", group: Some("system:masters"), node: None };
pub(super) const CLAIM_CONTROLLER: User =
    user("system:serviceaccount:kube-system:resource-claim-controller");
pub(super) const GARBAGE_COLLECTOR: User =
    user("system:serviceaccount:kube-system:generic-garbage-collector");
pub(super) const KUBELET: User =
    User { name: "system:node:policies-node", group: Some("system:nodes"), node: None };

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name.rsplit(':').next().unwrap_or(self.name))?;
        self.node.map_or(Ok(()), |node| write!(f, " of {node}"))
    }
}

/// What somebody asks of the API server.
#[derive(Clone)]
pub(super) enum Ask {
    Create(Value),
    Replace(Value),
    /// JSON merge patch.
    Merge(Value),
    /// JSON patch.
    Json(Value),
    /// Server-side apply, as this field manager.
    Apply(&'static str, Value),
    Delete,
    /// Of all that the field selector selects.
    DeleteCollection(String),
}

/// Where: resource, object, subresource.
#[derive(Clone, Copy)]
pub(super) struct At<'a>(pub &'a str, pub &'a str, pub &'a str);

/// A resource, without an object.
pub(super) const fn all(resource: &str) -> At<'_> {
    At(resource, "", "")
}

/// Writes down what differs from what it should be, and goes on.
pub(super) struct Desk {
    client: Client,
    namespace: String,
    made: RefCell<usize>,
    differences: RefCell<Vec<String>>,
}

impl Desk {
    pub(super) async fn open(bench: &Bench) -> anyhow::Result<Self> {
        if has_rbac(&bench.client).await? {
            let binding = json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
                "metadata": {"name": EDITOR.name},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": EDITOR.name}],
            });
            let bindings = format!(
                "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
                bench.namespace()
            );
            let request = Request::new(bindings)
                .create(&PostParams::default(), binding.to_string().into())?;
            bench.client.request::<Value>(request).await?;
            rights_in_force(bench).await?;
        }
        let (made, differences) = Default::default();
        Ok(Self {
            client: bench.client.clone(),
            namespace: bench.namespace().to_owned(),
            made,
            differences,
        })
    }

    /// The attempt must succeed; answers the object.
    pub(super) async fn allowed(&self, by: User, what: &str, at: At<'_>, ask: Ask) -> Value {
        match self.ask(by, at, &ask).await {
            Ok(object) => object,
            Err(error) => {
                self.note(format!("{what} by {by} should be allowed: {error}"));
                Value::Null
            }
        }
    }

    /// The attempt must be refused in words that contain `says`.
    pub(super) async fn refused(&self, by: User, what: &str, says: &str, at: At<'_>, ask: Ask) {
        match self.ask(by, at, &ask).await {
            Ok(object) => {
                self.note(format!("{what} by {by} should be refused"));
                self.take_back(at, &ask, &object).await;
            }
            Err(kube::Error::Api(status)) if status.message.contains(says) => {}
            Err(error) => {
                self.note(format!("{what} by {by} should be refused with \"{says}\": {error}"))
            }
        }
    }

    /// Creating it must succeed; what was created is deleted again.
    pub(super) async fn creatable(&self, by: User, what: &str, resource: &str, object: Value) {
        let ask = Ask::Create(object);
        let made = self.allowed(by, what, all(resource), ask.clone()).await;
        self.take_back(all(resource), &ask, &made).await;
    }

    /// Something else holds or does not.
    pub(super) fn expect(&self, what: &str, holds: bool) {
        *self.made.borrow_mut() += 1;
        if !holds {
            self.note(format!("{what}: it is not so"));
        }
    }

    /// How an object is now; nothing if it is gone.
    pub(super) async fn look(&self, at: At<'_>) -> anyhow::Result<Value> {
        let request = Request::new(self.path(at.0)).get(at.1, &Default::default())?;
        match self.client.request(request).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Value::Null),
            answer => Ok(answer?),
        }
    }

    /// Waits until a claim is gone.
    pub(super) async fn gone(&self, claim: &str) -> anyhow::Result<()> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &self.namespace);
        let judge = |found: Option<&ResourceClaim>| match found {
            None => Verdict::Done(()),
            Some(claim) => Verdict::NotYet(json!(claim.metadata).to_string()),
        };
        Ok(wait::until_one(claims, claim, &format!("claim {claim} to be gone"), PATIENCE, judge)
            .await?)
    }

    /// All that differed.
    pub(super) fn close(self) -> anyhow::Result<()> {
        let (made, differences) = (self.made.take(), self.differences.take());
        anyhow::ensure!(
            differences.is_empty(),
            "{} of {made} attempts:\n{}",
            differences.len(),
            differences.join("\n")
        );
        Ok(())
    }

    fn note(&self, difference: String) {
        self.differences.borrow_mut().push(difference);
    }

    async fn take_back(&self, at: At<'_>, ask: &Ask, object: &Value) {
        let Some(name) =
            object["metadata"]["name"].as_str().filter(|_| matches!(ask, Ask::Create(_)))
        else {
            return;
        };
        let at = At(at.0, name, "");
        self.allowed(ADMINISTRATOR, &format!("taking back {} {name}", at.0), at, Ask::Delete).await;
    }

    async fn ask(
        &self,
        by: User,
        At(resource, name, part): At<'_>,
        ask: &Ask,
    ) -> Result<Value, kube::Error> {
        *self.made.borrow_mut() += 1;
        let request = Request::new(self.path(resource));
        let patch = |patch: &Patch<&Value>, params: &PatchParams| match part {
            "" => request.patch(name, params, patch),
            part => request.patch_subresource(part, name, params, patch),
        };
        let mut request = match ask {
            Ask::Create(object) => {
                request.create(&PostParams::default(), object.to_string().into_bytes())
            }
            Ask::Replace(object) => {
                let body = object.to_string().into_bytes();
                match part {
                    "" => request.replace(name, &PostParams::default(), body),
                    part => request.replace_subresource(part, name, &PostParams::default(), body),
                }
            }
            Ask::Merge(body) => patch(&Patch::Merge(body), &PatchParams::default()),
            Ask::Json(operations) => {
                let operations =
                    serde_json::from_value(operations.clone()).map_err(kube::Error::SerdeError)?;
                patch(&Patch::Json(operations), &PatchParams::default())
            }
            Ask::Apply(manager, body) => patch(&Patch::Apply(body), &PatchParams::apply(manager)),
            Ask::Delete => {
                let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
                request.delete(name, &now)
            }
            Ask::DeleteCollection(fields) => request
                .delete_collection(&DeleteParams::default(), &ListParams::default().fields(fields)),
        }
        .map_err(kube::Error::BuildRequest)?;
        let headers = request.headers_mut();
        let value = |text: &str| text.parse().expect("invariant: names of users are good headers");
        headers.insert("impersonate-user", value(by.name));
        if let Some(group) = by.group {
            headers.insert("impersonate-group", value(group));
        }
        if let Some(node) = by.node {
            headers
                .insert("impersonate-extra-authentication.kubernetes.io%2fnode-name", value(node));
        }
        self.client.request(request).await
    }

    fn path(&self, resource: &str) -> String {
        let namespace = &self.namespace;
        match resource {
            "pods" | "secrets" => format!("/api/v1/namespaces/{namespace}/{resource}"),
            "nodes" => "/api/v1/nodes".to_owned(),
            "resourceslices" | "deviceclasses" => format!("/apis/resource.k8s.io/v1/{resource}"),
            _ => format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/{resource}"),
        }
    }
}

/// API servers learn of bindings by a watch of their own. Nothing tells when, so they are asked,
/// for as long as anything may take.
async fn rights_in_force(bench: &Bench) -> anyhow::Result<()> {
    let may_edit = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {
        "user": EDITOR.name,
        "resourceAttributes": {
            "namespace": bench.namespace(), "verb": "create", "group": "resource.k8s.io", "resource": "resourceclaims",
        },
    }});
    let reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let asked = async {
        let mut ticks = tokio::time::interval(ASK_EVERY);
        loop {
            ticks.tick().await;
            let ask = Request::new(reviews)
                .create(&PostParams::default(), may_edit.to_string().into())?;
            if bench.client.request::<Value>(ask).await?["status"]["allowed"] == true {
                return Ok::<_, anyhow::Error>(());
            }
        }
    };
    let asked = tokio::time::timeout(PATIENCE, asked).await;
    asked.map_err(|_| anyhow::anyhow!("{EDITOR} has no rights after {PATIENCE:?}"))?
}

/// The stand-ins have none: there everybody may do everything that no policy denies.
async fn has_rbac(client: &Client) -> Result<bool, kube::Error> {
    let groups = client.list_api_groups().await?;
    Ok(groups.groups.iter().any(|group| group.name == "rbac.authorization.k8s.io"))
}

/// A claim of one GPU; `rest` goes into its request beside the class.
pub(super) fn claim(name: &str, rest: Value) -> Value {
    let mut exactly = rest;
    exactly["deviceClassName"] = "gpu.tessera.dev".into();
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    })
}

/// An allocation of one device by each of these drivers, reserved for a consumer of a kind that
/// nobody knows: tessera-controller would release what nobody has reserved, and
/// kube-controller-manager what a pod has that does not exist.
pub(super) fn allocation(drivers: &[&str]) -> Value {
    let result = |driver: &&str| json!({"request": "gpu", "driver": driver, "pool": NODE, "device": "gpu-0"});
    let results: Vec<_> = drivers.iter().map(result).collect();
    json!({"status": {
        "reservedFor": [{"apiGroup": "example.com", "resource": "tests", "name": "x", "uid": "x"}],
        "allocation": {"allocationTimestamp": "2026-01-01T00:00:00Z", "devices": {"results": results}},
    }})
}

/// The end of an allocation.
pub(super) fn no_allocation() -> Value {
    json!({"status": {"allocation": null, "reservedFor": null}})
}

pub(super) const OURS: &str = "gpu.tessera.dev";
pub(super) const OTHER: &str = "gpu.example.com";
pub(super) const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
