//! Creation, replacement and deletion, as in the registry layer of the real server.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::admission::{Attempt, Policies};
use super::error::{ApiError, FieldError};
use super::kind::{Kind, StatusSubresource};
use super::store::{Key, State, Store, Write, Written};
use super::user::User;
use super::validate::{self, Part};
use super::{defaults, meta};

/// Location of an object, and the requesting user.
pub(crate) struct Request<'a> {
    pub(crate) store: &'a Store,
    pub(crate) kind: &'static Kind,
    pub(crate) namespace: &'a str,
    pub(crate) user: &'a User,
    /// The name of the client in `managedFields`.
    pub(crate) manager: &'a str,
    pub(crate) policies: Policies,
    pub(crate) now: Timestamp,
    /// True if a creation is checked and answered, and not stored.
    pub(crate) dry_run: bool,
}

impl Request<'_> {
    fn key(&self, name: &str) -> Key {
        (self.namespace.to_owned(), name.to_owned())
    }

    fn admit(
        &self,
        part: Part,
        object: Option<&Value>,
        current: Option<&Value>,
    ) -> Result<(), ApiError> {
        let status = part == Part::Status;
        self.policies.admit(&Attempt { kind: self.kind, status, user: self.user, object, current })
    }

    /// Creates an object that was decoded by its schema.
    ///
    /// # Errors
    /// Returns 404 or 403 for the namespace, 409 for a taken name, 422 for invalid fields.
    pub(crate) fn create(&self, object: Value) -> Result<Written, ApiError> {
        let named = !meta::name(&object).is_empty();
        // A random name may be taken, so the server tries several.
        let mut attempts = if named { 1 } else { 8 };
        loop {
            let mut object = object.clone();
            if !named && let Some(prefix) = object["metadata"]["generateName"].as_str() {
                // The API server cuts the prefix so that the name fits into 63 characters.
                let prefix: String = prefix.chars().take(58).collect();
                meta::metadata_mut(&mut object)
                    .insert("name".into(), format!("{prefix}{}", meta::random_suffix()).into());
            }
            let key = self.key(meta::name(&object));
            let made = self.store.transact(self.kind.table, &key, |state, current| match current {
                Some(current) => {
                    Err(ApiError::already_exists(self.kind, &key.1, meta::is_deleting(current)))
                }
                None => self.prepare_new(state, object).map(|object| match self.dry_run {
                    true => Write::Keep(Arc::new(object)),
                    false => Write::Put(object),
                }),
            });
            attempts -= 1;
            match made {
                Err(error) if error.reason == "AlreadyExists" && attempts > 0 => {}
                made => return made.map(|written| Written { created: true, ..written }),
            }
        }
    }

    /// Returns the object in its initial stored form.
    fn prepare_new(&self, state: &State, mut object: Value) -> Result<Value, ApiError> {
        let name = meta::name(&object).to_owned();
        self.check_namespace(state, &name)?;
        if !meta::resource_version(&object).is_empty() {
            return Err(ApiError::internal(
                "resourceVersion should not be set on objects to be created",
            ));
        }
        let metadata = meta::metadata_mut(&mut object);
        for field in
            ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "managedFields"]
        {
            metadata.remove(field);
        }
        metadata.insert("uid".into(), meta::new_uid().into());
        metadata.insert("creationTimestamp".into(), meta::seconds(self.now).into());
        if self.kind.generation {
            metadata.insert("generation".into(), 1.into());
        }
        if self.kind.namespaced {
            metadata.insert("namespace".into(), self.namespace.into());
        }
        defaults::fill(self.kind, &mut object, self.now);
        initial_status(self.kind, &mut object);
        let mut errors = validate::create(self.kind, &object);
        self.check_admin_access(state, &object, &mut errors);
        if !errors.is_empty() {
            return Err(ApiError::invalid(self.kind, &name, &errors));
        }
        self.admit(Part::Main, Some(&object), None)?;
        Ok(object)
    }

    fn check_namespace(&self, state: &State, name: &str) -> Result<(), ApiError> {
        if !self.kind.namespaced {
            return Ok(());
        }
        let namespaces =
            super::kind::find("", "v1", "namespaces").expect("invariant: namespaces are served");
        let Some(namespace) = state.get("namespaces", "", self.namespace) else {
            return Err(ApiError::not_found(namespaces, self.namespace));
        };
        if meta::is_deleting(namespace) {
            let because = format!(
                "unable to create new content in namespace {} because it is being terminated",
                self.namespace
            );
            let mut error = ApiError::forbidden(self.kind, name, &because);
            if let Some(details) = &mut error.details {
                details["causes"] = json!([{
                    "reason": "NamespaceTerminating",
                    "message": format!("namespace {} is being terminated", self.namespace),
                    "field": "metadata.namespace",
                }]);
            }
            return Err(error);
        }
        Ok(())
    }

    fn check_admin_access(&self, state: &State, object: &Value, errors: &mut Vec<FieldError>) {
        let spec = match self.kind.plural {
            "resourceclaims" => &object["spec"],
            "resourceclaimtemplates" => &object["spec"]["spec"],
            _ => return,
        };
        let allowed = state
            .get("namespaces", "", self.namespace)
            .and_then(|namespace| meta::label(namespace, "resource.kubernetes.io/admin-access"))
            == Some("true");
        if validate::needs_admin_namespace(spec) && !allowed {
            errors.push(FieldError::forbidden(
                "spec.devices.requests[0].exactly.adminAccess",
                "admin access to devices requires the `resource.kubernetes.io/admin-access: true` label on the containing namespace",
            ));
        }
    }

    /// Replaces an object, or a part of it, by the result of `make`.
    ///
    /// # Errors
    /// Returns 404, 409 for a stale resource version, 422 for invalid fields.
    pub(crate) fn update(
        &self,
        name: &str,
        part: Part,
        may_create: bool,
        make: impl FnOnce(Option<&Value>) -> Result<Value, ApiError>,
    ) -> Result<Written, ApiError> {
        let key = self.key(name);
        self.store.transact(self.kind.table, &key, |state, current| {
            let Some(current) = current else {
                if !may_create {
                    return Err(ApiError::not_found(self.kind, name));
                }
                let mut object = make(None)?;
                // Servers ignore the resource version of an object that is gone.
                meta::metadata_mut(&mut object).remove("resourceVersion");
                return self.prepare_new(state, object).map(Write::Put);
            };
            let mut object = make(Some(current))?;
            self.check_identity(&object, current)?;
            restore_protected_fields(self.kind, part, &mut object, current);
            record_nominator(self.kind, self.manager, &mut object, current);
            if part == Part::Main {
                defaults::fill(self.kind, &mut object, self.now);
            }
            let errors = validate::update(self.kind, part, &object, current);
            if !errors.is_empty() {
                return Err(ApiError::invalid(self.kind, name, &errors));
            }
            self.admit(part, Some(&object), Some(current))?;
            Ok(resolve_write(self.kind, object, current))
        })
    }

    fn check_identity(&self, object: &Value, current: &Value) -> Result<(), ApiError> {
        let name = meta::name(current);
        if !meta::name(object).is_empty() && meta::name(object) != name {
            let message = format!(
                "the name of the object ({}) does not match the name on the URL ({name})",
                meta::name(object)
            );
            return Err(ApiError::bad_request(message));
        }
        let version = meta::resource_version(object);
        if version.is_empty() && self.kind.versioned_update {
            let error = FieldError::invalid(
                "metadata.resourceVersion",
                0,
                "must be specified for an update",
            );
            return Err(ApiError::invalid(self.kind, name, &[error]));
        }
        let (asked, have) = (meta::uid(object), meta::uid(current));
        if !asked.is_empty() && asked != have {
            let because = format!(
                "Precondition failed: UID in precondition: {asked}, UID in object meta: {have}"
            );
            return Err(ApiError::conflict(self.kind, name, &because));
        }
        if !version.is_empty() && version != "0" && version != meta::resource_version(current) {
            return Err(ApiError::stale(self.kind, name));
        }
        Ok(())
    }

    /// Deletes an object; a pod gracefully.
    ///
    /// # Errors
    /// Returns 404, or 409 for a failed precondition.
    pub(crate) fn delete(&self, name: &str, options: &DeleteOptions) -> Result<Written, ApiError> {
        let key = self.key(name);
        self.store.transact(self.kind.table, &key, |_, current| {
            let Some(current) = current else { return Err(ApiError::not_found(self.kind, name)) };
            options.check(self.kind, name, current)?;
            self.admit(Part::Main, None, Some(current))?;
            Ok(self.begin_deletion(current, options))
        })
    }

    fn begin_deletion(&self, current: &Arc<Value>, options: &DeleteOptions) -> Write {
        let mut object = Value::clone(current);
        let grace = grace(self.kind, current, options);
        if let Some(finalizer) = options.propagation_finalizer()
            && !meta::is_deleting(current)
        {
            let metadata = meta::metadata_mut(&mut object);
            match metadata.entry("finalizers").or_insert_with(|| json!([])) {
                Value::Array(list) => list.push(finalizer.into()),
                other => *other = json!([finalizer]),
            }
        }
        if self.kind.plural == "namespaces" {
            object["status"]["phase"] = "Terminating".into();
        }
        let shorter = grace < meta::grace_seconds(current);
        if grace == 0 && is_removable(self.kind, &object) {
            return Write::Remove(object);
        }
        if meta::is_deleting(current) && !shorter {
            return Write::Keep(current.clone());
        }
        let metadata = meta::metadata_mut(&mut object);
        metadata.insert("deletionTimestamp".into(), meta::later(self.now, grace).into());
        metadata.insert("deletionGracePeriodSeconds".into(), grace.into());
        if self.kind.generation {
            bump_generation(&mut object);
        }
        Write::Put(object)
    }
}

/// Returns the seconds until a pod may be removed. A pod without a kubelet is removed at once.
fn grace(kind: &Kind, current: &Value, options: &DeleteOptions) -> i64 {
    if kind.plural != "pods" {
        return 0;
    }
    let bound = current["spec"]["nodeName"].as_str().is_some_and(|node| !node.is_empty());
    let over = matches!(current["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    if !bound || over {
        return 0;
    }
    let own = current["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(30);
    let asked = options.grace_period_seconds.unwrap_or(own).max(0);
    if meta::is_deleting(current) { asked.min(meta::grace_seconds(current)) } else { asked }
}

/// Returns true if no finalizer holds the object.
fn is_removable(kind: &Kind, object: &Value) -> bool {
    let kept_by_namespace = kind.plural == "namespaces"
        && object["spec"]["finalizers"].as_array().is_some_and(|list| !list.is_empty());
    meta::finalizers(object).is_empty() && !kept_by_namespace
}

fn initial_status(kind: &Kind, object: &mut Value) {
    match kind.plural {
        // A kubelet registers its node together with the status.
        "nodes" => {}
        "pods" => {
            object["status"] = json!({"phase": "Pending", "qosClass": qos_class(&object["spec"])});
            if object["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty()) {
                object["status"]["conditions"] = json!([{
                    "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
                    "message": "Scheduling is blocked due to non-empty scheduling gates",
                    "lastProbeTime": null, "lastTransitionTime": null,
                }]);
            }
        }
        "namespaces" => {
            object["spec"] = json!({"finalizers": ["kubernetes"]});
            object["status"] = json!({"phase": "Active"});
        }
        _ if kind.status != StatusSubresource::None => {
            if let Some(map) = object.as_object_mut() {
                map.remove("status");
            }
        }
        _ => {}
    }
}

fn qos_class(spec: &Value) -> &'static str {
    let containers = || {
        ["containers", "initContainers"].into_iter().filter_map(|l| spec[l].as_array()).flatten()
    };
    let amount =
        |container: &Value, which: &str, name: &str| container["resources"][which][name].clone();
    let bare = containers().all(|c| {
        ["requests", "limits"]
            .iter()
            .all(|w| ["cpu", "memory"].iter().all(|n| amount(c, w, n).is_null()))
    });
    let full = containers().all(|c| {
        ["cpu", "memory"].iter().all(|n| {
            !amount(c, "limits", n).is_null() && amount(c, "limits", n) == amount(c, "requests", n)
        })
    });
    match (bare, full) {
        (true, _) => "BestEffort",
        (_, true) => "Guaranteed",
        _ => "Burstable",
    }
}

/// Records the client that changes a pod's nomination. One that writes the same value again does
/// not become its manager.
fn record_nominator(kind: &Kind, manager: &str, object: &mut Value, current: &Value) {
    let nominated = &object["status"]["nominatedNodeName"];
    if kind.plural != "pods" || *nominated == current["status"]["nominatedNodeName"] {
        return;
    }
    let is_nominated = !nominated.is_null();
    let metadata = meta::metadata_mut(object);
    metadata.remove("managedFields");
    if is_nominated {
        let fields = json!([{
            "manager": manager, "operation": "Update", "apiVersion": "v1",
            "fieldsType": "FieldsV1", "fieldsV1": {"f:status": {"f:nominatedNodeName": {}}},
            "subresource": "status",
        }]);
        metadata.insert("managedFields".into(), fields);
    }
}

/// Restores the fields that this part of the API may not change.
fn restore_protected_fields(kind: &Kind, part: Part, object: &mut Value, current: &Value) {
    for field in [
        "name",
        "namespace",
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "generateName",
        "resourceVersion",
        "managedFields",
    ] {
        meta::restore(object, current, field);
    }
    let keep = |object: &mut Value, field: &str| match &current[field] {
        Value::Null => {
            object.as_object_mut().map(|map| map.remove(field));
        }
        value => object[field] = value.clone(),
    };
    match part {
        Part::Main => {
            if kind.status != StatusSubresource::None {
                keep(object, "status");
            }
            if kind.plural == "namespaces" {
                keep(object, "spec");
            }
        }
        Part::Status => {
            keep(object, "spec");
            meta::restore(object, current, "ownerReferences");
            if kind.status == StatusSubresource::StatusOnly {
                for field in ["labels", "annotations", "finalizers"] {
                    meta::restore(object, current, field);
                }
            }
            match kind.plural {
                "pods" => keep_pod_status(object, current),
                "resourceclaims" => drop_deallocated_devices(object, current),
                _ => {}
            }
        }
        Part::Finalize => keep(object, "status"),
        Part::Binding => {}
    }
}

/// Keeps fields of a pod's status that are missing in the update, for writers that do not know
/// them.
fn keep_pod_status(pod: &mut Value, current: &Value) {
    for field in ["qosClass", "resourceClaimStatuses", "observedGeneration"] {
        if pod["status"][field].is_null() && !current["status"][field].is_null() {
            pod["status"][field] = current["status"][field].clone();
        }
    }
}

/// Removes the status of devices that are no longer allocated.
fn drop_deallocated_devices(claim: &mut Value, current: &Value) {
    let id =
        |device: &Value| ["driver", "pool", "device", "shareID"].map(|field| device[field].clone());
    let allocated = |claim: &Value| -> Vec<[Value; 4]> {
        let results = claim["status"]["allocation"]["devices"]["results"].as_array();
        results.into_iter().flatten().map(id).collect()
    };
    let (before, now) = (allocated(current), allocated(claim));
    if let Some(devices) = claim["status"]["devices"].as_array_mut() {
        devices.retain(|device| !before.contains(&id(device)) || now.contains(&id(device)));
        if devices.is_empty()
            && let Some(status) = claim["status"].as_object_mut()
        {
            status.remove("devices");
        }
    }
}

/// Returns the write for an updated object: none, a replacement, or the final removal.
fn resolve_write(kind: &Kind, mut object: Value, current: &Arc<Value>) -> Write {
    if &object == current.as_ref() {
        if meta::is_deleting(current)
            && meta::grace_seconds(current) == 0
            && is_removable(kind, current)
        {
            return Write::Remove(object);
        }
        return Write::Keep(current.clone());
    }
    let bound_now =
        kind.plural == "pods" && object["spec"]["nodeName"] != current["spec"]["nodeName"];
    if kind.generation && object["spec"] != current["spec"] && !bound_now {
        bump_generation(&mut object);
    }
    if meta::is_deleting(&object)
        && meta::grace_seconds(&object) == 0
        && is_removable(kind, &object)
    {
        return Write::Remove(object);
    }
    Write::Put(object)
}

fn bump_generation(object: &mut Value) {
    let generation = object["metadata"]["generation"].as_i64().unwrap_or(0) + 1;
    meta::metadata_mut(object).insert("generation".into(), generation.into());
}

/// Options of a deletion.
#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DeleteOptions {
    pub(crate) grace_period_seconds: Option<i64>,
    pub(crate) preconditions: Option<Preconditions>,
    pub(crate) propagation_policy: Option<String>,
}

/// Preconditions of a deletion.
#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Preconditions {
    pub(crate) uid: Option<String>,
    pub(crate) resource_version: Option<String>,
}

impl DeleteOptions {
    fn check(&self, kind: &Kind, name: &str, current: &Value) -> Result<(), ApiError> {
        let Some(preconditions) = &self.preconditions else { return Ok(()) };
        let failed = |what: &str, asked: &str, have: &str| {
            let because = format!(
                "Precondition failed: {what} in precondition: {asked}, {what} in object meta: {have}"
            );
            Err(ApiError::conflict(kind, name, &because))
        };
        match (&preconditions.uid, &preconditions.resource_version) {
            (Some(uid), _) if uid != meta::uid(current) => failed("UID", uid, meta::uid(current)),
            (_, Some(version)) if version != meta::resource_version(current) => {
                failed("ResourceVersion", version, meta::resource_version(current))
            }
            _ => Ok(()),
        }
    }

    fn propagation_finalizer(&self) -> Option<&'static str> {
        match self.propagation_policy.as_deref() {
            Some("Foreground") => Some("foregroundDeletion"),
            Some("Orphan") => Some("orphan"),
            _ => None,
        }
    }
}
