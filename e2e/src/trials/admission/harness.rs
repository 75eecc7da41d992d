//! Harness of admission trials: impersonated API requests with expected outcomes.

use std::cell::RefCell;
use std::fmt;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::Request;
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::trials::test_bed::{TIMEOUT, TestBed, wait_deleted};
use crate::wait::{self, CheckResult};

/// A user that the administrator impersonates.
#[derive(Clone, Copy)]
pub(super) struct User {
    name: &'static str,
    group: Option<&'static str>,
    /// Node to which the service account's token is bound.
    node: Option<&'static str>,
}

const fn user(name: &'static str) -> User {
    User { name, group: None, node: None }
}

/// A node that does not exist, so its slices affect nothing.
pub(super) const NODE: &str = "policies-node";

pub(super) const ADMINISTRATOR: User =
    User { name: "root", group: Some("system:masters"), node: None };
/// Has the rights of the cluster role `edit` in the namespace.
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
/// kube-controller-manager without service accounts of its own, which then has all rights.
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

/// A request to the API server.
#[derive(Clone)]
pub(super) enum Action {
    Create(Value),
    Replace(Value),
    /// JSON merge patch.
    Merge(Value),
    /// JSON patch.
    Json(Value),
    /// Server-side apply with this field manager.
    Apply(&'static str, Value),
    Delete,
    /// All objects that the field selector selects.
    DeleteCollection(String),
}

/// Target of a request: resource, object, subresource.
#[derive(Clone, Copy)]
pub(super) struct Target<'a>(pub &'a str, pub &'a str, pub &'a str);

/// Returns the target of a resource without an object.
pub(super) const fn all(resource: &str) -> Target<'_> {
    Target(resource, "", "")
}

/// Sends requests as different users, and records unexpected outcomes without stopping.
pub(super) struct AdmissionHarness {
    client: Client,
    namespace: String,
    attempts: RefCell<usize>,
    failures: RefCell<Vec<String>>,
}

impl AdmissionHarness {
    pub(super) async fn new(test_bed: &TestBed) -> anyhow::Result<Self> {
        if has_rbac(&test_bed.client).await? {
            let binding = json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
                "metadata": {"name": EDITOR.name},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": EDITOR.name}],
            });
            let bindings = format!(
                "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
                test_bed.namespace()
            );
            let request = Request::new(bindings)
                .create(&PostParams::default(), binding.to_string().into())?;
            test_bed.client.request::<Value>(request).await?;
            rights_in_force(test_bed).await?;
        }
        let (attempts, failures) = Default::default();
        Ok(Self {
            client: test_bed.client.clone(),
            namespace: test_bed.namespace().to_owned(),
            attempts,
            failures,
        })
    }

    /// Expects the request to succeed; returns the object.
    pub(super) async fn expect_allowed(
        &self,
        by: User,
        what: &str,
        target: Target<'_>,
        action: Action,
    ) -> Value {
        match self.send(by, target, &action).await {
            Ok(object) => object,
            Err(error) => {
                self.record(format!("{what} by {by} should be allowed: {error}"));
                Value::Null
            }
        }
    }

    /// Expects the request to be denied with a message that contains `message`.
    pub(super) async fn expect_denied(
        &self,
        by: User,
        what: &str,
        message: &str,
        target: Target<'_>,
        action: Action,
    ) {
        match self.send(by, target, &action).await {
            Ok(object) => {
                self.record(format!("{what} by {by} should be denied"));
                self.delete_created(target, &action, &object).await;
            }
            Err(kube::Error::Api(status)) if status.message.contains(message) => {}
            Err(error) => {
                self.record(format!("{what} by {by} should be denied with \"{message}\": {error}"))
            }
        }
    }

    /// Expects the creation to succeed; deletes the created object.
    pub(super) async fn expect_creatable(
        &self,
        by: User,
        what: &str,
        resource: &str,
        object: Value,
    ) {
        let action = Action::Create(object);
        let attempts = self.expect_allowed(by, what, all(resource), action.clone()).await;
        self.delete_created(all(resource), &action, &attempts).await;
    }

    /// Expects that `condition` is true.
    pub(super) fn expect(&self, what: &str, condition: bool) {
        *self.attempts.borrow_mut() += 1;
        if !condition {
            self.record(format!("{what}: not the case"));
        }
    }

    /// Returns an object; `null` if it does not exist.
    pub(super) async fn get(&self, target: Target<'_>) -> anyhow::Result<Value> {
        let request = Request::new(self.path(target.0)).get(target.1, &Default::default())?;
        match self.client.request(request).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Value::Null),
            answer => Ok(answer?),
        }
    }

    /// Waits until a claim is deleted.
    pub(super) async fn wait_deleted(&self, claim: &str) -> anyhow::Result<()> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &self.namespace);
        wait_deleted(claims, claim).await
    }

    /// Returns an error that lists all unexpected outcomes.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        let (attempts, failures) = (self.attempts.take(), self.failures.take());
        anyhow::ensure!(
            failures.is_empty(),
            "{} of {attempts} attempts:\n{}",
            failures.len(),
            failures.join("\n")
        );
        Ok(())
    }

    fn record(&self, failure: String) {
        self.failures.borrow_mut().push(failure);
    }

    async fn delete_created(&self, target: Target<'_>, action: &Action, object: &Value) {
        let Some(name) =
            object["metadata"]["name"].as_str().filter(|_| matches!(action, Action::Create(_)))
        else {
            return;
        };
        let target = Target(target.0, name, "");
        self.expect_allowed(
            ADMINISTRATOR,
            &format!("deleting created {} {name}", target.0),
            target,
            Action::Delete,
        )
        .await;
    }

    async fn send(
        &self,
        by: User,
        Target(resource, name, subresource): Target<'_>,
        action: &Action,
    ) -> Result<Value, kube::Error> {
        *self.attempts.borrow_mut() += 1;
        let request = Request::new(self.path(resource));
        let patch = |patch: &Patch<&Value>, params: &PatchParams| match subresource {
            "" => request.patch(name, params, patch),
            subresource => request.patch_subresource(subresource, name, params, patch),
        };
        let mut request = match action {
            Action::Create(object) => {
                request.create(&PostParams::default(), object.to_string().into_bytes())
            }
            Action::Replace(object) => {
                let body = object.to_string().into_bytes();
                match subresource {
                    "" => request.replace(name, &PostParams::default(), body),
                    subresource => {
                        request.replace_subresource(subresource, name, &PostParams::default(), body)
                    }
                }
            }
            Action::Merge(body) => patch(&Patch::Merge(body), &PatchParams::default()),
            Action::Json(operations) => {
                let operations =
                    serde_json::from_value(operations.clone()).map_err(kube::Error::SerdeError)?;
                patch(&Patch::Json(operations), &PatchParams::default())
            }
            Action::Apply(manager, body) => {
                patch(&Patch::Apply(body), &PatchParams::apply(manager))
            }
            Action::Delete => {
                let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
                request.delete(name, &now)
            }
            Action::DeleteCollection(fields) => request
                .delete_collection(&DeleteParams::default(), &ListParams::default().fields(fields)),
        }
        .map_err(kube::Error::BuildRequest)?;
        let headers = request.headers_mut();
        let value =
            |text: &str| text.parse().expect("invariant: user names are valid header values");
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
            "gpuresizes" => {
                format!("/apis/gpu.tessera.dev/v1alpha1/namespaces/{namespace}/{resource}")
            }
            _ => format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/{resource}"),
        }
    }
}

/// Waits until the editor's RoleBinding is in force. API servers observe bindings by their own
/// watch and report nothing, so access reviews are sent until one succeeds.
async fn rights_in_force(test_bed: &TestBed) -> anyhow::Result<()> {
    let may_edit = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {
        "user": EDITOR.name,
        "resourceAttributes": {
            "namespace": test_bed.namespace(), "verb": "create", "group": "resource.k8s.io", "resource": "resourceclaims",
        },
    }});
    let reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let is_in_force = async || {
        let review =
            Request::new(reviews).create(&PostParams::default(), may_edit.to_string().into())?;
        let status = test_bed.client.request::<Value>(review).await?["status"].take();
        Ok(CheckResult::done_if(status["allowed"] == true, || status.to_string()))
    };
    wait::poll(&format!("the RoleBinding of {EDITOR} to be in force"), TIMEOUT, is_in_force).await
}

/// Returns true if the API server has RBAC. The simulated one allows everything that no policy
/// denies.
async fn has_rbac(client: &Client) -> Result<bool, kube::Error> {
    let groups = client.list_api_groups().await?;
    Ok(groups.groups.iter().any(|group| group.name == "rbac.authorization.k8s.io"))
}

/// Returns a claim of one GPU; `rest` is the rest of its request.
pub(super) fn claim(name: &str, rest: Value) -> Value {
    let mut exactly = rest;
    exactly["deviceClassName"] = "gpu.tessera.dev".into();
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    })
}

/// Returns an allocation of one device per driver, reserved for a consumer of an unknown kind.
/// Otherwise tessera-controller would release an unreserved one, and kube-controller-manager one
/// reserved for a missing pod.
pub(super) fn allocation(drivers: &[&str]) -> Value {
    let result = |driver: &&str| json!({"request": "gpu", "driver": driver, "pool": NODE, "device": "gpu-0"});
    let results: Vec<_> = drivers.iter().map(result).collect();
    json!({"status": {
        "reservedFor": [{"apiGroup": "example.com", "resource": "tests", "name": "x", "uid": "x"}],
        "allocation": {"allocationTimestamp": "2026-01-01T00:00:00Z", "devices": {"results": results}},
    }})
}

/// Allocates a claim as tessera-controller, which the policies allow. `status` is the claim's.
pub(super) async fn expect_allocation(harness: &AdmissionHarness, status: Target<'_>) {
    let allocate = Action::Merge(allocation(&[OWN_DRIVER]));
    harness.expect_allowed(CONTROLLER, "an allocation", status, allocate).await;
}

/// Returns the patch that releases an allocation.
pub(super) fn no_allocation() -> Value {
    json!({"status": {"allocation": null, "reservedFor": null}})
}

pub(super) const OWN_DRIVER: &str = "gpu.tessera.dev";
pub(super) const OTHER_DRIVER: &str = "gpu.example.com";
pub(super) const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
