//! A fake API server for the requests of the driver. Objects are JSON. Each change gets the next
//! resource version.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, broadcast, watch};

/// The fake API server. Clones share it.
#[derive(Clone)]
pub struct Api {
    shared: Arc<Shared>,
}

struct Shared {
    objects: Mutex<Objects>,
    slice_events: broadcast::Sender<Value>,
    node_events: broadcast::Sender<Value>,
    resize_events: broadcast::Sender<Value>,
    changed: watch::Sender<u64>,
    /// Reads of claims need a permit.
    claim_reads: Semaphore,
}

#[derive(Default)]
struct Objects {
    version: u64,
    claims: BTreeMap<(String, String), Value>,
    /// `status.capacity` of every Node.
    capacity: BTreeMap<String, String>,
    slices: BTreeMap<String, Value>,
    /// DeviceTaintRules, and the number of their reads.
    rules: BTreeMap<String, Value>,
    rule_reads: usize,
    /// GpuResizes of the namespace `ns`.
    resizes: BTreeMap<String, Value>,
    /// A GpuResize that another client stores before the driver's next report.
    overtaking_resize: Option<Value>,
    events: Vec<Value>,
    /// Number of reads of claims that fail, and their status code.
    failures: (usize, u16),
    /// Name of a claim whose reads fail, and their status code.
    failing_claim: Option<(String, u16)>,
    claim_reads: usize,
    /// True to drop taints, as a server without the feature DRADeviceTaints does.
    drop_taints: bool,
    /// Number of slice writes of the driver.
    slice_writes: usize,
    /// Returns true if another client writes the slice before the driver's write.
    overtakes: Option<Overtakes>,
}

type Overtakes = Box<dyn FnMut() -> bool + Send>;

const MANY: usize = 1_000_000;

impl Api {
    pub fn new() -> Self {
        let shared = Shared {
            objects: Mutex::default(),
            slice_events: broadcast::Sender::new(1024),
            node_events: broadcast::Sender::new(1024),
            resize_events: broadcast::Sender::new(1024),
            changed: watch::Sender::default(),
            claim_reads: Semaphore::new(MANY),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Returns a client, without a network.
    pub fn client(&self) -> kube::Client {
        kube::Client::new(self.router(), "default")
    }

    pub fn router(&self) -> Router {
        Router::new()
            .route("/api/v1/nodes/{name}", get(node))
            .route("/api/v1/nodes", get(nodes))
            .route("/apis/resource.k8s.io/v1/resourceclaims", get(claims))
            .route(
                "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}",
                get(claim),
            )
            .route("/apis/resource.k8s.io/v1/resourceslices", get(slices).post(create_slice))
            .route(
                "/apis/resource.k8s.io/v1/resourceslices/{name}",
                axum::routing::patch(patch_slice).delete(remove_slice),
            )
            .route("/apis/resource.k8s.io/v1/devicetaintrules/{name}", get(rule))
            .route("/apis/gpu.tessera.dev/v1alpha1/gpuresizes", get(resizes))
            .route(
                "/apis/gpu.tessera.dev/v1alpha1/namespaces/ns/gpuresizes/{name}/status",
                axum::routing::patch(patch_resize),
            )
            .route(
                "/apis/events.k8s.io/v1/namespaces/{namespace}/events",
                axum::routing::post(create_event),
            )
            .with_state(self.clone())
    }

    pub fn put_claim(&self, claim: Value) {
        let key = (text(&claim["metadata"]["namespace"]), text(&claim["metadata"]["name"]));
        self.change(|objects| {
            objects.claims.insert(key, claim);
        });
    }

    /// Stores a DeviceTaintRule.
    pub fn put_rule(&self, name: &str, spec: Value) {
        let rule = json!({"metadata": {"name": name}, "spec": spec});
        self.change(|objects| objects.rules.insert(name.to_owned(), rule));
    }

    pub fn remove_rule(&self, name: &str) {
        self.change(|objects| objects.rules.remove(name));
    }

    /// Stores a GpuResize, and delivers it to the watch of its node.
    pub fn put_resize(&self, name: &str, resize: Value) {
        let stored = self.change(|objects| {
            let resize = stamped(objects, resize);
            objects.resizes.insert(name.to_owned(), resize.clone());
            resize
        });
        // There may be no watch.
        let _ = self.shared.resize_events.send(json!({"type": "MODIFIED", "object": stored}));
    }

    /// Has a GpuResize stored between the driver's next report and its answer, which contains it.
    pub fn overtake_report(&self, resize: Value) {
        self.change(|objects| objects.overtaking_resize = Some(resize));
    }

    /// Returns a GpuResize.
    pub fn resize(&self, name: &str) -> Value {
        self.objects(|objects| objects.resizes[name].clone())
    }

    /// Returns the number of reads of DeviceTaintRules.
    pub fn rule_reads(&self) -> usize {
        self.objects(|objects| objects.rule_reads)
    }

    pub fn remove_claim(&self, namespace: &str, name: &str) {
        self.change(|objects| {
            objects.claims.remove(&(namespace.to_owned(), name.to_owned()));
        });
    }

    /// Lets the next `times` reads of claims fail with `code`.
    pub fn fail_claim_reads(&self, times: usize, code: u16) {
        self.change(|objects| objects.failures = (times, code));
    }

    pub fn fail_reads_of_claim(&self, name: &str, code: u16) {
        self.change(|objects| objects.failing_claim = Some((name.to_owned(), code)));
    }

    /// Holds reads of claims until [`Api::release_claim_reads`].
    pub fn hold_claim_reads(&self) {
        self.shared
            .claim_reads
            .try_acquire_many(MANY as u32)
            .expect("no read is under way")
            .forget();
    }

    pub fn release_claim_reads(&self) {
        self.shared.claim_reads.add_permits(MANY);
    }

    /// Returns the number of reads of claims that were started.
    pub fn claim_reads(&self) -> usize {
        self.objects(|objects| objects.claim_reads)
    }

    pub fn drop_taints(&self) {
        self.change(|objects| objects.drop_taints = true);
    }

    /// Sets the function that decides which writes of slices another client overtakes.
    pub fn overtake_slice_writes(&self, overtakes: impl FnMut() -> bool + Send + 'static) {
        self.objects(|objects| objects.overtakes = Some(Box::new(overtakes)));
    }

    /// Returns the number of slice writes of the driver.
    pub fn slice_writes(&self) -> usize {
        self.objects(|objects| objects.slice_writes)
    }

    /// Returns the watch events of slices from now on.
    pub fn slice_events(&self) -> broadcast::Receiver<Value> {
        self.shared.slice_events.subscribe()
    }

    /// Returns the slices of the driver.
    pub fn slices(&self) -> Vec<Value> {
        let own = |slice: &&Value| slice["spec"]["driver"] == "gpu.tessera.dev";
        self.objects(|objects| objects.slices.values().filter(own).cloned().collect())
    }

    /// Sets the capacity of an extended resource of the Node.
    pub fn set_capacity(&self, resource: &str, amount: &str) {
        self.change(|objects| objects.capacity.insert(resource.to_owned(), amount.to_owned()));
        // There may be no watch.
        let node = self.objects(|objects| node_object(objects, "node-a"));
        let _ = self.shared.node_events.send(json!({"type": "MODIFIED", "object": node}));
    }

    /// Writes a slice as another client.
    pub fn put_slice(&self, slice: Value) {
        let stored = self.change(|objects| {
            let mut slice = slice;
            slice["metadata"]["uid"] = json!(format!("uid-{}", objects.version));
            store(objects, slice)
        });
        self.notify("ADDED", &stored);
    }

    pub fn events(&self) -> Vec<Value> {
        self.objects(|objects| objects.events.clone())
    }

    /// Deletes all slices, as the kubelet does when it starts.
    pub fn wipe_slices(&self) {
        let names: Vec<_> = self.objects(|objects| objects.slices.keys().cloned().collect());
        for name in names {
            self.delete_slice(&name);
        }
    }

    pub fn delete_slice(&self, name: &str) -> Option<Value> {
        let removed = self.change(|objects| {
            let removed = objects.slices.remove(name)?;
            Some(stamped(objects, removed))
        })?;
        self.notify("DELETED", &removed);
        Some(removed)
    }

    /// Changes a slice as another client.
    pub fn edit_slice(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let edited = self.change(|objects| {
            let mut slice = objects.slices[name].clone();
            edit(&mut slice);
            store(objects, slice)
        });
        self.notify("MODIFIED", &edited);
    }

    /// Counts a write of the driver. Returns true if another client is faster.
    fn is_overtaken(&self) -> bool {
        self.objects(|objects| {
            objects.slice_writes += 1;
            objects.overtakes.as_mut().is_some_and(|overtakes| overtakes())
        })
    }

    /// Annotates a slice as another client, if it exists.
    fn annotate(&self, name: &str) {
        if self.objects(|objects| objects.slices.contains_key(name)) {
            self.edit_slice(name, |slice| {
                let version = slice["metadata"]["resourceVersion"].clone();
                slice["metadata"]["annotations"]["rival"] = version;
            });
        }
    }

    /// Waits until `wanted` returns a value.
    pub async fn wait_for<T>(&self, what: &str, mut wanted: impl FnMut(&Self) -> Option<T>) -> T {
        let mut changed = self.shared.changed.subscribe();
        let search = async {
            loop {
                changed.mark_unchanged();
                if let Some(found) = wanted(self) {
                    return found;
                }
                changed.changed().await.expect("the API lives");
            }
        };
        match tokio::time::timeout(std::time::Duration::from_secs(300), search).await {
            Ok(found) => found,
            Err(_) => panic!("{what} did not come; slices: {:#?}", self.slices()),
        }
    }

    fn objects<T>(&self, read: impl FnOnce(&mut Objects) -> T) -> T {
        read(&mut self.shared.objects.lock().expect("no panic"))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Objects) -> T) -> T {
        let result = self.objects(|objects| {
            objects.version += 1;
            change(objects)
        });
        self.shared.changed.send_modify(|version| *version += 1);
        result
    }

    fn notify(&self, kind: &str, slice: &Value) {
        // There may be no watch.
        let _ = self.shared.slice_events.send(json!({"type": kind, "object": slice}));
    }
}

fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

fn stamped(objects: &Objects, mut object: Value) -> Value {
    object["metadata"]["resourceVersion"] = json!(objects.version.to_string());
    object
}

fn store(objects: &mut Objects, slice: Value) -> Value {
    let mut slice = stamped(objects, slice);
    slice["apiVersion"] = json!("resource.k8s.io/v1");
    slice["kind"] = json!("ResourceSlice");
    for device in slice["spec"]["devices"].as_array_mut().into_iter().flatten() {
        if objects.drop_taints {
            device.as_object_mut().expect("a device").remove("taints");
        }
        for taint in device["taints"].as_array_mut().into_iter().flatten() {
            if taint.get("timeAdded").is_none() {
                taint["timeAdded"] = json!("2026-01-01T00:00:00Z");
            }
        }
        if device["taints"].is_null() {
            device.as_object_mut().expect("a device").remove("taints");
        }
    }
    objects.slices.insert(text(&slice["metadata"]["name"]), slice.clone());
    slice
}

fn failure(code: u16, reason: &str) -> Response {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": reason,
                        "reason": reason, "code": code});
    (StatusCode::from_u16(code).expect("a code"), Json(status)).into_response()
}

fn node_object(objects: &Objects, name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "uid": "uid-of-the-node", "resourceVersion": objects.version.to_string()},
        "status": {"capacity": objects.capacity},
    })
}

async fn node(State(api): State<Api>, Path(name): Path<String>) -> Response {
    Json(api.objects(|objects| node_object(objects, &name))).into_response()
}

async fn rule(State(api): State<Api>, Path(name): Path<String>) -> Response {
    let rule = api.change(|objects| {
        objects.rule_reads += 1;
        objects.rules.get(&name).cloned()
    });
    rule.map_or_else(|| failure(404, "NotFound"), |rule| Json(rule).into_response())
}

async fn nodes(State(api): State<Api>, Query(query): Query<BTreeMap<String, String>>) -> Response {
    if query.get("watch").map(String::as_str) == Some("true") {
        let events =
            tokio_stream::wrappers::BroadcastStream::new(api.shared.node_events.subscribe());
        // The changes between the list and this watch.
        let now = json!({"type": "MODIFIED", "object": api.objects(|objects| node_object(objects, "node-a"))});
        let events =
            futures::stream::iter([now]).chain(events.filter_map(|event| async { event.ok() }));
        let lines = events.map(|event| Ok::<_, std::convert::Infallible>(format!("{event}\n")));
        return Response::new(Body::from_stream(lines));
    }
    let (version, node) =
        api.objects(|objects| (objects.version.to_string(), node_object(objects, "node-a")));
    let list = json!({"apiVersion": "v1", "kind": "NodeList", "metadata": {"resourceVersion": version}, "items": [node]});
    Json(list).into_response()
}

/// Returns true if a slice matches a field selector.
fn selected(slice: &Value, query: &BTreeMap<String, String>) -> bool {
    let terms = query.get("fieldSelector").map_or("", String::as_str);
    terms.split(',').filter_map(|term| term.split_once('=')).all(|(field, value)| match field {
        "spec.driver" => slice["spec"]["driver"] == value,
        "spec.nodeName" => slice["spec"]["nodeName"] == value,
        other => panic!("slices are not selected by {other}"),
    })
}

async fn claim(State(api): State<Api>, Path(key): Path<(String, String)>) -> Response {
    api.change(|objects| objects.claim_reads += 1);
    let _permit = api.shared.claim_reads.acquire().await.expect("open");
    api.objects(|objects| {
        if objects.failures.0 > 0 {
            objects.failures.0 -= 1;
            return failure(objects.failures.1, "Failing");
        }
        if let Some((_, code)) = objects.failing_claim.as_ref().filter(|(name, _)| *name == key.1) {
            return failure(*code, "Failing");
        }
        objects
            .claims
            .get(&key)
            .map_or_else(|| failure(404, "NotFound"), |claim| Json(claim).into_response())
    })
}

async fn claims(State(api): State<Api>) -> Response {
    let items: Vec<_> = api.objects(|objects| objects.claims.values().cloned().collect());
    let list = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimList", "metadata": {}, "items": items});
    Json(list).into_response()
}

async fn slices(State(api): State<Api>, Query(query): Query<BTreeMap<String, String>>) -> Response {
    if query.get("watch").map(String::as_str) == Some("true") {
        let events =
            tokio_stream::wrappers::BroadcastStream::new(api.shared.slice_events.subscribe());
        let since: u64 =
            query.get("resourceVersion").and_then(|text| text.parse().ok()).unwrap_or(0);
        // The changes between the list and this watch, without deleted slices.
        let missed: Vec<_> = api.objects(|objects| {
            let newer = |slice: &&Value| {
                text(&slice["metadata"]["resourceVersion"])
                    .parse::<u64>()
                    .is_ok_and(|at| at > since)
            };
            objects
                .slices
                .values()
                .filter(newer)
                .filter(|slice| selected(slice, &query))
                .map(|slice| json!({"type": "MODIFIED", "object": slice}))
                .collect()
        });
        let events = events.filter_map(|event| async { event.ok() });
        let events =
            events.filter(move |event| std::future::ready(selected(&event["object"], &query)));
        let events = futures::stream::iter(missed).chain(events);
        let lines = events.map(|event| Ok::<_, std::convert::Infallible>(format!("{event}\n")));
        return Response::new(Body::from_stream(lines));
    }
    let (version, items) = api.objects(|objects| {
        let found = objects.slices.values().filter(|slice| selected(slice, &query));
        (objects.version.to_string(), found.cloned().collect::<Vec<_>>())
    });
    let list = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSliceList",
                      "metadata": {"resourceVersion": version}, "items": items});
    Json(list).into_response()
}

async fn create_slice(State(api): State<Api>, Json(mut slice): Json<Value>) -> Response {
    let name = text(&slice["metadata"]["name"]);
    // As the other instance of an update does.
    if api.is_overtaken() && api.objects(|objects| !objects.slices.contains_key(&name)) {
        api.put_slice(slice.clone());
    }
    let created = api.change(|objects| {
        if objects.slices.contains_key(&name) {
            return None;
        }
        slice["metadata"]["uid"] = json!(format!("uid-{}", objects.version));
        Some(store(objects, slice))
    });
    let Some(created) = created else { return failure(409, "AlreadyExists") };
    api.notify("ADDED", &created);
    (StatusCode::CREATED, Json(created)).into_response()
}

async fn patch_slice(
    State(api): State<Api>,
    Path(name): Path<String>,
    Json(body): Json<Value>,
) -> Response {
    if api.is_overtaken() {
        api.annotate(&name);
    }
    let patched = api.change(|objects| {
        let Some(current) = objects.slices.get(&name) else { return Err((404, "NotFound")) };
        let precondition = &body["metadata"]["resourceVersion"];
        if !precondition.is_null() && *precondition != current["metadata"]["resourceVersion"] {
            return Err((409, "Conflict"));
        }
        let mut slice = current.clone();
        merge(&mut slice, body);
        Ok(store(objects, slice))
    });
    match patched {
        Err((code, reason)) => failure(code, reason),
        Ok(patched) => {
            api.notify("MODIFIED", &patched);
            Json(patched).into_response()
        }
    }
}

async fn remove_slice(
    State(api): State<Api>,
    Path(name): Path<String>,
    Json(options): Json<Value>,
) -> Response {
    if api.is_overtaken() {
        api.annotate(&name);
    }
    let precondition = &options["preconditions"]["resourceVersion"];
    let differs = |slice: &Value| slice["metadata"]["resourceVersion"] != *precondition;
    if !precondition.is_null()
        && api.objects(|objects| objects.slices.get(&name).is_some_and(differs))
    {
        return failure(409, "Conflict");
    }
    api.delete_slice(&name)
        .map_or_else(|| failure(404, "NotFound"), |removed| Json(removed).into_response())
}

async fn resizes(
    State(api): State<Api>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    assert_eq!(query["fieldSelector"], "status.node=node-a", "resizes of one node");
    if query.get("watch").map(String::as_str) == Some("true") {
        let events =
            tokio_stream::wrappers::BroadcastStream::new(api.shared.resize_events.subscribe());
        // The changes between the list and this watch.
        let now: Vec<_> = api.objects(|objects| {
            let event = |resize| json!({"type": "MODIFIED", "object": resize});
            objects.resizes.values().map(event).collect()
        });
        let events =
            futures::stream::iter(now).chain(events.filter_map(|event| async { event.ok() }));
        let lines = events.map(|event| Ok::<_, std::convert::Infallible>(format!("{event}\n")));
        return Response::new(Body::from_stream(lines));
    }
    let (version, items) = api.objects(|objects| {
        (objects.version.to_string(), objects.resizes.values().cloned().collect::<Vec<_>>())
    });
    let list = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuResizeList",
                      "metadata": {"resourceVersion": version}, "items": items});
    Json(list).into_response()
}

/// Applies the driver's part of a status.
async fn patch_resize(
    State(api): State<Api>,
    Path(name): Path<String>,
    // An apply patch has a content type of its own.
    body: String,
) -> Response {
    let mut patch: Value = serde_json::from_str(&body).expect("JSON");
    if let Some(resize) = api.change(|objects| objects.overtaking_resize.take()) {
        api.put_resize(&name, resize);
    }
    let mut resize = api.resize(&name);
    if resize["metadata"]["uid"] != patch["metadata"]["uid"] {
        return failure(409, "Conflict");
    }
    let status = &mut resize["status"];
    status["applied"] = patch["status"]["applied"].take();
    status["appliedGrant"] = patch["status"]["appliedGrant"].take();
    let mut conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    conditions.retain(|condition| condition["type"] != "Applied");
    conditions.extend(patch["status"]["conditions"].as_array().expect("conditions").clone());
    status["conditions"] = conditions.into();
    api.put_resize(&name, resize.clone());
    Json(resize).into_response()
}

async fn create_event(State(api): State<Api>, Json(event): Json<Value>) -> Response {
    api.change(|objects| objects.events.push(event.clone()));
    (StatusCode::CREATED, Json(event)).into_response()
}

/// Applies a merge patch (RFC 7396).
fn merge(target: &mut Value, patch: Value) {
    let Value::Object(fields) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let object = target.as_object_mut().expect("just made one");
    for (key, value) in fields {
        if value.is_null() {
            object.remove(&key);
        } else {
            merge(object.entry(key).or_insert(Value::Null), value);
        }
    }
}
