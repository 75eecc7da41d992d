//! A fake API server in this process with the requests that the controller makes: list, watch, get,
//! merge patch and replacement with `resourceVersion` preconditions, create,
//! delete. It does not validate or
//! default objects, and knows no DRA.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub(crate) mod controller;
pub(crate) mod objects;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use futures::{StreamExt, TryStreamExt};
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::{broadcast, watch};

/// A fault that is applied to a write before it is served.
pub(crate) type Fault = Box<dyn FnMut(&mut Store, &Request) -> Option<Response> + Send>;

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: Method,
    /// Path below `/apis/group/version` or `/api/version`.
    pub(crate) path: String,
    pub(crate) body: Value,
}

/// All objects by `resource/namespace/name`.
#[derive(Default)]
pub(crate) struct Store {
    version: u64,
    objects: BTreeMap<String, Value>,
    /// Every write that was served, in order.
    pub(crate) writes: Vec<Request>,
    /// Every list: the resource and its query.
    pub(crate) lists: Vec<(String, BTreeMap<String, String>)>,
    /// Resources whose lists and watches are refused, with status code and reason.
    refused_kinds: BTreeMap<String, (u16, &'static str)>,
    faults: Vec<Fault>,
    /// Status codes with which the next reads of single objects are refused.
    refused_reads: Vec<u16>,
    watchers: BTreeMap<String, broadcast::Sender<Value>>,
}

/// The fake API server; clones share the store.
#[derive(Clone)]
pub(crate) struct FakeApi {
    store: Arc<Mutex<Store>>,
    changed: watch::Sender<u64>,
    /// The delay of the answers to writes.
    lag: Arc<Mutex<Duration>>,
    /// Called before a write that was served is answered, on a thread of its own.
    hold: Arc<Mutex<Option<Hold>>>,
}

type Hold = Box<dyn FnMut(&Request) + Send>;

impl FakeApi {
    pub(crate) fn new() -> Self {
        Self {
            store: Arc::default(),
            changed: watch::Sender::new(0),
            lag: Arc::default(),
            hold: Arc::default(),
        }
    }

    pub(crate) fn client(&self) -> Client {
        let router: Router = Router::new()
            .route("/apis/{group}/{version}/{*path}", any(grouped))
            .route("/api/{version}/{*path}", any(core))
            .with_state(self.clone());
        Client::new(router, "default")
    }

    /// Creates or replaces an object, as another client.
    pub(crate) fn put(&self, resource: &str, object: Value) -> Value {
        let stored = self.store.lock().unwrap().put(resource, object);
        self.notify();
        stored
    }

    pub(crate) fn delete(&self, resource: &str, namespace: &str, name: &str) {
        self.store.lock().unwrap().delete(&key(resource, namespace, name));
        self.notify();
    }

    pub(crate) fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        self.store.lock().unwrap().objects.get(&key(resource, namespace, name)).cloned()
    }

    pub(crate) fn list(&self, resource: &str) -> Vec<Value> {
        self.store.lock().unwrap().list(resource)
    }

    pub(crate) fn writes(&self) -> Vec<Request> {
        self.store.lock().unwrap().writes.clone()
    }

    pub(crate) fn lists(&self) -> Vec<(String, BTreeMap<String, String>)> {
        self.store.lock().unwrap().lists.clone()
    }

    /// Adds a fault, which is called before each write.
    pub(crate) fn fault(
        &self,
        fault: impl FnMut(&mut Store, &Request) -> Option<Response> + Send + 'static,
    ) {
        self.store.lock().unwrap().faults.push(Box::new(fault));
    }

    /// Refuses the next reads of single objects with these status codes.
    pub(crate) fn refuse_reads(&self, codes: &[u16]) {
        self.store.lock().unwrap().refused_reads = codes.iter().rev().copied().collect();
    }

    /// Stops serving a resource, as an older API server.
    pub(crate) fn lacks(&self, resource: &str) {
        self.refuse(resource, 404, "NotFound");
    }

    /// Forbids to list and watch a resource, as without a ClusterRole for it.
    pub(crate) fn forbids(&self, resource: &str) {
        self.refuse(resource, 403, "Forbidden");
    }

    /// Serves a resource again that was refused.
    pub(crate) fn permits(&self, resource: &str) {
        self.store.lock().unwrap().refused_kinds.remove(resource);
    }

    fn refuse(&self, resource: &str, code: u16, reason: &'static str) {
        let mut store = self.store.lock().unwrap();
        store.refused_kinds.insert(resource.to_owned(), (code, reason));
    }

    /// Breaks the connection of every watch; watches may start again.
    pub(crate) fn break_watches(&self) {
        self.store.lock().unwrap().watchers.clear();
    }

    /// Delays the answers to writes from now on.
    pub(crate) fn answer_late(&self, lag: Duration) {
        *self.lag.lock().unwrap() = lag;
    }

    /// Calls `hold` before each write that was served is answered; it may block.
    pub(crate) fn hold_answers(&self, hold: impl FnMut(&Request) + Send + 'static) {
        *self.hold.lock().unwrap() = Some(Box::new(hold));
    }

    /// Removes an object without an event for watches.
    pub(crate) fn vanish(&self, resource: &str, namespace: &str, name: &str) {
        self.store.lock().unwrap().objects.remove(&key(resource, namespace, name));
    }

    async fn answer(&self, request: Request, query: &BTreeMap<String, String>) -> Response {
        let is_write = request.method != Method::GET;
        let response = self.serve(request.clone(), query);
        if is_write && self.hold.lock().unwrap().is_some() {
            let held = Arc::clone(&self.hold);
            let hold = move || held.lock().unwrap().as_mut().map_or((), |hold| hold(&request));
            tokio::task::spawn_blocking(hold).await.unwrap();
        }
        let lag = *self.lag.lock().unwrap();
        if is_write && !lag.is_zero() {
            tokio::time::sleep(lag).await;
        }
        response
    }

    /// Waits until `condition` returns a value; it is called at every change of the store.
    pub(crate) async fn until<T>(&self, what: &str, condition: impl Fn(&Self) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        let wait = async {
            loop {
                if let Some(found) = condition(self) {
                    return found;
                }
                changed.changed().await.unwrap();
            }
        };
        let limit = Duration::from_secs(30);
        tokio::time::timeout(limit, wait).await.unwrap_or_else(|_| panic!("never came: {what}"))
    }

    fn notify(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    fn serve(&self, request: Request, query: &BTreeMap<String, String>) -> Response {
        let parts: Vec<&str> = request.path.split('/').collect();
        match (request.method.as_str(), parts.as_slice()) {
            ("GET", [resource] | ["namespaces", _, resource])
                if query.get("watch").is_some_and(|w| w == "true" || w == "1") =>
            {
                self.watch(resource, query)
            }
            ("GET", [resource]) => {
                self.store.lock().unwrap().lists.push(((*resource).to_owned(), query.clone()));
                self.listing(resource)
            }
            ("GET", [resource, name]) => match self.get(resource, "", name) {
                Some(object) => answer(StatusCode::OK, &object),
                None => failure(404, "NotFound"),
            },
            ("GET", ["namespaces", _, resource]) => self.listing(resource),
            ("GET", ["namespaces", namespace, resource, name]) => {
                if let Some(code) = self.store.lock().unwrap().refused_reads.pop() {
                    return failure(code, "Refused");
                }
                match self.get(resource, namespace, name) {
                    Some(object) => answer(StatusCode::OK, &object),
                    None => failure(404, "NotFound"),
                }
            }
            _ => {
                let mut store = self.store.lock().unwrap();
                let mut faults = std::mem::take(&mut store.faults);
                let fault = faults.iter_mut().find_map(|fault| fault(&mut store, &request));
                store.faults.append(&mut faults);
                let response = fault.unwrap_or_else(|| store.write(&request, &parts));
                drop(store);
                self.notify();
                response
            }
        }
    }

    fn listing(&self, resource: &str) -> Response {
        let store = self.store.lock().unwrap();
        if let Some((code, reason)) = store.refused_kinds.get(resource) {
            return failure(*code, reason);
        }
        let version = store.version.to_string();
        answer(
            StatusCode::OK,
            &json!({"metadata": {"resourceVersion": version}, "items": store.list(resource)}),
        )
    }

    /// Streams objects newer than the requested version, then changes.
    fn watch(&self, resource: &str, query: &BTreeMap<String, String>) -> Response {
        let since: u64 = query.get("resourceVersion").and_then(|v| v.parse().ok()).unwrap_or(0);
        let mut store = self.store.lock().unwrap();
        if let Some((code, reason)) = store.refused_kinds.get(resource) {
            return failure(*code, reason);
        }
        let sender =
            store.watchers.entry(resource.to_owned()).or_insert_with(|| broadcast::channel(1024).0);
        let live = sender.subscribe();
        let missed = store.list(resource).into_iter().filter(|o| version_of(o) > since);
        let missed: Vec<Value> =
            missed.map(|object| json!({"type": "ADDED", "object": object})).collect();
        let live = futures::stream::unfold(live, async |mut live| Some((live.recv().await, live)));
        let lines =
            futures::stream::iter(missed).map(Ok).chain(live).map_ok(|event| format!("{event}\n"));
        Response::new(Body::from_stream(lines))
    }
}

impl Store {
    pub(crate) fn put(&mut self, resource: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let key = key(resource, &text("namespace"), &text("name"));
        let kind = if self.objects.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        self.objects.insert(key, object.clone());
        self.tell(resource, kind, &object);
        object
    }

    pub(crate) fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<&Value> {
        self.objects.get(&key(resource, namespace, name))
    }

    fn delete(&mut self, key: &str) {
        if let Some(mut object) = self.objects.remove(key) {
            self.version += 1;
            object["metadata"]["resourceVersion"] = self.version.to_string().into();
            self.tell(key.split('/').next().unwrap(), "DELETED", &object);
        }
    }

    fn tell(&self, resource: &str, kind: &str, object: &Value) {
        if let Some(sender) = self.watchers.get(resource) {
            // Fails if no watch is open; then no client has to be notified.
            let _ = sender.send(json!({"type": kind, "object": object}));
        }
    }

    fn list(&self, resource: &str) -> Vec<Value> {
        let prefix = format!("{resource}/");
        self.objects
            .iter()
            .filter(|(key, _)| key.starts_with(&prefix))
            .map(|(_, o)| o.clone())
            .collect()
    }

    fn write(&mut self, request: &Request, parts: &[&str]) -> Response {
        self.writes.push(request.clone());
        match (request.method.as_str(), parts) {
            ("PATCH", ["namespaces", namespace, resource, name, status @ ..]) => self.patch(
                &key(resource, namespace, name),
                resource,
                request,
                status.first() == Some(&"status"),
            ),
            ("PATCH", [resource, name]) => {
                self.patch(&key(resource, "", name), resource, request, false)
            }
            ("DELETE", ["namespaces", namespace, resource, name]) => {
                let key = key(resource, namespace, name);
                let Some(old) = self.objects.get(&key) else { return failure(404, "NotFound") };
                let asked = &request.body["preconditions"]["uid"];
                if !asked.is_null() && *asked != old["metadata"]["uid"] {
                    return failure(409, "Conflict");
                }
                self.delete(&key);
                answer(StatusCode::OK, &json!({"kind": "Status", "status": "Success"}))
            }
            ("PUT", ["namespaces", namespace, resource, name]) => {
                self.replace(resource, &key(resource, namespace, name), request)
            }
            ("PUT", [resource, name]) => self.replace(resource, &key(resource, "", name), request),
            ("POST", ["namespaces", namespace, "pods", name, "eviction"]) => {
                self.evict(&key("pods", namespace, name), request)
            }
            ("POST", ["namespaces", namespace, resource]) => {
                let mut object = request.body.clone();
                object["metadata"]["namespace"] = (*namespace).into();
                self.create(resource, namespace, object)
            }
            ("POST", [resource]) => {
                let mut object = request.body.clone();
                object["metadata"]["uid"] = format!("uid-{}", self.version).into();
                self.create(resource, "", object)
            }
            _ => failure(405, "MethodNotAllowed"),
        }
    }

    fn evict(&mut self, key: &str, request: &Request) -> Response {
        let Some(mut pod) = self.objects.get(key).cloned() else { return failure(404, "NotFound") };
        let options = &request.body["deleteOptions"];
        if options["preconditions"]["uid"] != pod["metadata"]["uid"] {
            return failure(409, "Conflict");
        }
        if options["dryRun"].is_null() {
            pod["metadata"]["deletionTimestamp"] = "2026-11-28T00:00:00Z".into();
            self.put("pods", pod);
        }
        answer(StatusCode::CREATED, &json!({"kind": "Status", "status": "Success"}))
    }

    fn create(&mut self, resource: &str, namespace: &str, object: Value) -> Response {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        if self.objects.contains_key(&key(resource, namespace, name)) {
            return failure(409, "AlreadyExists");
        }
        answer(StatusCode::CREATED, &self.put(resource, object))
    }

    fn replace(&mut self, resource: &str, key: &str, request: &Request) -> Response {
        let Some(old) = self.objects.get(key) else { return failure(404, "NotFound") };
        if conflicts(old, &request.body) {
            return failure(409, "Conflict");
        }
        answer(StatusCode::OK, &self.put(resource, request.body.clone()))
    }

    fn patch(&mut self, key: &str, resource: &str, request: &Request, status: bool) -> Response {
        let Some(old) = self.objects.get(key) else { return failure(404, "NotFound") };
        if conflicts(old, &request.body) {
            return failure(409, "Conflict");
        }
        let mut patched = old.clone();
        merge(&mut patched, &request.body);
        // The status subresource changes the status only, the object everything else.
        let (mut new, other) = if status { (old.clone(), patched) } else { (patched, old.clone()) };
        match other.get("status") {
            Some(status) => new["status"] = status.clone(),
            None => drop(new.as_object_mut().unwrap().remove("status")),
        }
        answer(StatusCode::OK, &self.put(resource, new))
    }
}

fn key(resource: &str, namespace: &str, name: &str) -> String {
    format!("{resource}/{namespace}/{name}")
}

fn version_of(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().and_then(|v| v.parse().ok()).unwrap_or(0)
}

fn conflicts(old: &Value, new: &Value) -> bool {
    let asked = &new["metadata"]["resourceVersion"];
    !asked.is_null() && *asked != old["metadata"]["resourceVersion"]
}

/// Applies a JSON merge patch (RFC 7396).
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in fields {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(name);
        } else {
            merge(&mut target[name], value);
        }
    }
}

fn answer(code: StatusCode, body: &Value) -> Response {
    (code, body.to_string()).into_response()
}

pub(crate) fn failure(code: u16, reason: &str) -> Response {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason});
    answer(StatusCode::from_u16(code).unwrap(), &body)
}

async fn grouped(
    State(api): State<FakeApi>,
    Path((_, _, path)): Path<(String, String, String)>,
    Query(query): Query<BTreeMap<String, String>>,
    method: Method,
    body: Bytes,
) -> Response {
    api.answer(Request { method, path, body: parse(&body) }, &query).await
}

async fn core(
    State(api): State<FakeApi>,
    Path((_, path)): Path<(String, String)>,
    Query(query): Query<BTreeMap<String, String>>,
    method: Method,
    body: Bytes,
) -> Response {
    api.answer(Request { method, path, body: parse(&body) }, &query).await
}

fn parse(body: &Bytes) -> Value {
    if body.is_empty() { Value::Null } else { serde_json::from_slice(body).unwrap() }
}
