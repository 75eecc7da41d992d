//! HTTP requests: parsing, dispatch and responses.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Query as AxumQuery, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE, HOST, USER_AGENT};
use axum::http::{HeaderMap, Method, Request as HttpRequest, Response, StatusCode};
use futures::StreamExt;
use serde_json::Value;
use tokio_stream::wrappers::ReceiverStream;

use super::admission::Policies;
use super::clock::Clock;
use super::error::ApiError;
use super::fault::{Fault, Faults, RequestInfo};
use super::kind::Kind;
use super::lifecycle::{DeleteOptions, Request};
use super::patch::{self, AppliedFields, Patch};
use super::route::{Query, Route};
use super::selector::Selector;
use super::store::{Store, Write, Written};
use super::user::{Tokens, User};
use super::validate::Part;
use super::view::{self, View};
use super::watch::{self, Signals};
use super::{discovery, meta, subresource};

/// Maximum size of a request body in the real server.
const BODY_LIMIT: usize = 3 * 1024 * 1024;

/// State shared by all requests.
pub(crate) struct Shared {
    pub(crate) store: Arc<Store>,
    pub(crate) tokens: Tokens,
    pub(crate) policies: RwLock<Policies>,
    pub(crate) signals: Arc<Signals>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) clock: Clock,
    pub(crate) applied: Mutex<AppliedFields>,
    pub(crate) bookmark_every: Duration,
    pub(crate) watch_timeout: Duration,
}

impl Shared {
    fn applied(&self) -> MutexGuard<'_, AppliedFields> {
        self.applied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn policies(&self) -> Policies {
        *self.policies.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks a request of the observer port, where no faults are injected.
#[derive(Clone, Copy)]
pub(crate) struct Observer;

/// A parsed request.
pub(crate) struct Call<'a> {
    /// True if no faults are injected.
    pub(crate) faults_disabled: bool,
    pub(crate) shared: &'a Shared,
    pub(crate) user: User,
    /// The beginning of the User-Agent.
    pub(crate) client: String,
    pub(crate) route: Route,
    pub(crate) query: Query,
    pub(crate) view: View,
    pub(crate) media_type: String,
    pub(crate) body: Bytes,
}

/// Handles every request.
pub(crate) async fn handle(
    State(shared): State<Arc<Shared>>,
    request: HttpRequest<Body>,
) -> Response<Body> {
    handle_request(&shared, request).await.unwrap_or_else(|error| failure(&error))
}

async fn handle_request(
    shared: &Shared,
    request: HttpRequest<Body>,
) -> Result<Response<Body>, ApiError> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    if matches!(path, "/healthz" | "/readyz" | "/livez") {
        return respond(StatusCode::OK, "text/plain", "ok");
    }
    let user = shared.tokens.identify(&parts.headers)?;
    let host = text_header(&parts.headers, HOST.as_str());
    if let Some(answer) = discovery::answer(path, host) {
        return json(StatusCode::OK, &answer);
    }
    let route = Route::parse(path).ok_or_else(ApiError::no_such_path)?;
    let query = AxumQuery::try_from_uri(&parts.uri)
        .map(|AxumQuery(query)| Query(query))
        .map_err(|error| ApiError::bad_request(error.to_string()))?;
    let body = axum::body::to_bytes(body, BODY_LIMIT)
        .await
        .map_err(|error| ApiError::bad_request(format!("cannot read request body: {error}")))?;
    let media_type = text_header(&parts.headers, CONTENT_TYPE.as_str())
        .split(';')
        .next()
        .unwrap_or_default()
        .trim();
    let call = Call {
        faults_disabled: parts.extensions.get::<Observer>().is_some(),
        shared,
        user,
        client: text_header(&parts.headers, USER_AGENT.as_str())
            .split('/')
            .next()
            .unwrap_or_default()
            .to_owned(),
        route,
        query,
        view: View::from_accept(text_header(&parts.headers, ACCEPT.as_str())),
        media_type: media_type.to_owned(),
        body,
    };
    let info = call.info(&parts.method);
    tracing::debug!(user = %info.user.name, verb = info.verb, resource = info.resource, name = info.name, "request");
    match if call.faults_disabled { Fault::None } else { shared.faults.decide(&info) } {
        Fault::None => {}
        Fault::Refuse(error) => return Err(error),
        Fault::DropResponse(error) => {
            drop(call.run(&parts.method).await);
            return Err(error);
        }
        Fault::ConflictingWrite => call.write_conflicting_change(&info.name)?,
        Fault::Hold(until) => until.cancelled().await,
        Fault::HoldResponse { serve, answer } => {
            serve.cancelled().await;
            let response = call.run(&parts.method).await;
            answer.cancelled().await;
            return response;
        }
    }
    call.run(&parts.method).await
}

/// Annotation written to cause a conflict.
const CONFLICT_ANNOTATION: &str = "simcluster.example/overtaken";

impl Call<'_> {
    fn info(&self, method: &Method) -> RequestInfo {
        let verb = match (method.as_str(), &self.route.name) {
            ("GET" | "HEAD", None) if self.query.flag("watch") => "watch",
            ("GET" | "HEAD", None) => "list",
            ("GET" | "HEAD", Some(_)) => "get",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            ("DELETE", None) => "deletecollection",
            _ => "delete",
        };
        RequestInfo {
            user: self.user.clone(),
            verb,
            group: self.route.kind.group,
            resource: self.route.kind.plural,
            subresource: self.route.subresource.clone().unwrap_or_default(),
            namespace: self.route.in_namespace().to_owned(),
            name: self.route.name.clone().unwrap_or_default(),
        }
    }

    /// Updates an unrelated annotation of the object, as a concurrent writer would.
    fn write_conflicting_change(&self, name: &str) -> Result<(), ApiError> {
        let kind = self.route.kind;
        let key = (self.route.in_namespace().to_owned(), name.to_owned());
        self.shared.store.transact(kind.table, &key, |_, current| {
            let current = current.ok_or_else(|| ApiError::not_found(kind, name))?;
            let mut object = Value::clone(current);
            let annotations = meta::metadata_mut(&mut object)
                .entry("annotations")
                .or_insert_with(|| serde_json::json!({}));
            annotations[CONFLICT_ANNOTATION] = meta::resource_version(current).into();
            Ok(Write::Put(object))
        })?;
        Ok(())
    }

    async fn run(&self, method: &Method) -> Result<Response<Body>, ApiError> {
        self.check_dry_run(method)?;
        let name = self.route.name.as_deref();
        let subresource = self.route.subresource.as_deref();
        match (method.as_str(), name, subresource) {
            ("GET", None, None) if self.query.flag("watch") => self.watch(),
            ("GET", None, None) => self.list(),
            ("POST", None, None) => self.create(),
            ("DELETE", None, None) => self.delete_all(),
            ("GET", Some(name), None) => self.get(name),
            ("PUT", Some(name), None) => self.replace(name, Part::Main),
            ("PATCH", Some(name), None) => self.patch(name, Part::Main),
            ("DELETE", Some(name), None) => self.delete(name),
            (_, Some(name), Some(subresource)) => {
                subresource::run(self, method, name, subresource).await
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    pub(crate) fn request(&self) -> Request<'_> {
        Request {
            store: &self.shared.store,
            kind: self.route.kind,
            namespace: self.route.in_namespace(),
            user: &self.user,
            manager: self.query.text("fieldManager").unwrap_or(&self.client),
            policies: self.shared.policies(),
            now: self.shared.clock.now(),
            dry_run: self.query.text("dryRun").is_some(),
        }
    }

    /// Refuses dry runs that this server does not serve: it would store what it was asked not to.
    fn check_dry_run(&self, method: &Method) -> Result<(), ApiError> {
        match (self.query.text("dryRun"), *method == Method::POST) {
            (None, _) | (Some("All"), true) => Ok(()),
            (Some("All"), false) => {
                Err(ApiError::bad_request("dryRun is served for creations only"))
            }
            (Some(other), _) => Err(ApiError::bad_request(format!(
                "dryRun: Unsupported value: {other:?}: supported values: \"All\""
            ))),
        }
    }

    pub(crate) fn stored(&self, name: &str) -> Result<Arc<Value>, ApiError> {
        let kind = self.route.kind;
        self.shared
            .store
            .get(kind.table, self.route.in_namespace(), name)
            .ok_or_else(|| ApiError::not_found(kind, name))
    }

    pub(crate) fn get(&self, name: &str) -> Result<Response<Body>, ApiError> {
        let object = self.stored(name)?;
        json(StatusCode::OK, &self.view.object(self.route.kind, &object))
    }

    fn selector(&self) -> Result<Selector, ApiError> {
        Selector::parse(
            self.route.kind,
            self.route.namespace.as_deref(),
            self.query.text("labelSelector"),
            self.query.text("fieldSelector"),
        )
    }

    fn resource_version(&self) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.query.text("resourceVersion") else { return Ok(None) };
        text.parse().map(Some).map_err(|_| {
            ApiError::bad_request(format!(
                "Invalid value: \"{text}\": strconv.ParseUint: parsing \"{text}\": invalid syntax"
            ))
        })
    }

    fn list(&self) -> Result<Response<Body>, ApiError> {
        let (kind, selector) = (self.route.kind, self.selector()?);
        let namespace = selector.namespace.as_deref();
        let asked = self.resource_version()?.unwrap_or_default();
        // A continuation resumes after the last key, in the state of its first page.
        let continued = self.query.text("continue").map(Continue::parse).transpose()?;
        let exact = self.query.text("resourceVersionMatch") == Some("Exact");
        let store = &self.shared.store;
        let listed = match &continued {
            Some(from) => store
                .list_at(kind.table, namespace, from.revision)
                .map_err(|_| ApiError::continue_expired())?,
            None if exact => store.list_at(kind.table, namespace, asked)?,
            None if asked > store.revision() => {
                return Err(ApiError::too_large_resource_version(asked, store.revision()));
            }
            None => store.list(kind.table, namespace),
        };
        let key =
            |object: &Value| (meta::namespace(object).to_owned(), meta::name(object).to_owned());
        let mut objects: Vec<&Value> = listed
            .objects
            .iter()
            .map(AsRef::as_ref)
            .filter(|object| selector.matches(object))
            .filter(|object| continued.as_ref().is_none_or(|from| key(object) > from.after))
            .collect();
        let mut metadata = view::list_metadata(listed.revision);
        let limit =
            self.query.number::<usize>("limit").filter(|limit| *limit > 0).unwrap_or(usize::MAX);
        if objects.len() > limit {
            metadata.insert("remainingItemCount".into(), (objects.len() - limit).into());
            objects.truncate(limit);
            let after = objects.last().map(|last| key(last)).unwrap_or_default();
            metadata.insert(
                "continue".into(),
                Continue { revision: listed.revision, after }.to_string().into(),
            );
        }
        let body = self.view.list(kind, objects.into_iter(), metadata)?;
        respond(StatusCode::OK, "application/json", body)
    }

    fn watch(&self) -> Result<Response<Body>, ApiError> {
        let initial = self.query.text("sendInitialEvents").map(|text| text == "true");
        if initial.is_some() && self.query.text("resourceVersionMatch") != Some("NotOlderThan") {
            let detail = "resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
            return Err(ApiError::unprocessable(format!(
                "ListOptions.meta.k8s.io \"\" is invalid: {detail}"
            )));
        }
        let timeout = self.query.number("timeoutSeconds").map(Duration::from_secs);
        let request = watch::WatchRequest {
            kind: self.route.kind,
            selector: self.selector()?,
            view: self.view,
            resource_version: self.resource_version()?,
            send_initial_events: initial == Some(true),
            bookmarks: self.query.flag("allowWatchBookmarks"),
            bookmark_every: self.shared.bookmark_every,
            timeout: timeout.unwrap_or(self.shared.watch_timeout),
            faults: (!self.faults_disabled)
                .then(|| (self.shared.faults.clone(), self.info(&Method::GET))),
        };
        let lines = watch::start(self.shared.store.clone(), &self.shared.signals, request);
        let stream = ReceiverStream::new(lines).map(Ok::<Bytes, std::io::Error>);
        respond(StatusCode::OK, "application/json", Body::from_stream(stream))
    }

    /// Returns the body as an object of this kind, in the stored form.
    fn object(&self) -> Result<Value, ApiError> {
        let raw = match self.media_type.as_str() {
            "" | "application/json" => serde_json::from_slice(&self.body)
                .map_err(|error| ApiError::bad_request(error.to_string()))?,
            "application/yaml" => patch::yaml(&self.body)?,
            other => return Err(ApiError::unsupported_media_type(other)),
        };
        decode(self.route.kind, raw, self.query.is_strict())
    }

    fn create(&self) -> Result<Response<Body>, ApiError> {
        let object = self.object()?;
        let inside = meta::namespace(&object);
        if self.route.kind.namespaced && self.route.namespace.is_none() {
            return Err(ApiError::method_not_allowed());
        }
        if !inside.is_empty() && inside != self.route.in_namespace() {
            return Err(ApiError::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        self.written(&self.request().create(object)?)
    }

    pub(crate) fn replace(&self, name: &str, part: Part) -> Result<Response<Body>, ApiError> {
        let object = self.object()?;
        let may_create = part == Part::Main && self.route.kind.create_on_update;
        self.written(&self.request().update(name, part, may_create, |_| Ok(object))?)
    }

    pub(crate) fn patch(&self, name: &str, part: Part) -> Result<Response<Body>, ApiError> {
        let patch = Patch::parse(&self.media_type, &self.body)?;
        let kind = self.route.kind;
        let apply = matches!(patch, Patch::Apply(_));
        let manager = format!("{} {part:?}", self.query.text("fieldManager").unwrap_or_default());
        if apply && self.query.text("fieldManager").is_none() {
            return Err(ApiError::bad_request(
                "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch",
            ));
        }
        let made = self.request().update(name, part, apply && part == Part::Main, |current| {
            let current = match current {
                Some(current) => view::present(kind, current),
                None => {
                    let mut fresh = serde_json::json!({});
                    meta::metadata_mut(&mut fresh).insert("name".into(), name.into());
                    fresh
                }
            };
            let mut patched = patch.apply(&current)?;
            if let Patch::Apply(applied) = &patch {
                self.shared.applied().prune(&mut patched, meta::uid(&current), &manager, applied);
            }
            decode(kind, patched, self.query.is_strict())
        })?;
        if let Patch::Apply(applied) = &patch {
            self.shared.applied().record(meta::uid(&made.object), &manager, applied);
        }
        self.written(&made)
    }

    fn delete_options(&self) -> Result<DeleteOptions, ApiError> {
        let mut options: DeleteOptions = if self.body.is_empty() {
            DeleteOptions::default()
        } else {
            serde_json::from_slice(&self.body)
                .map_err(|error| ApiError::bad_request(error.to_string()))?
        };
        options.grace_period_seconds =
            options.grace_period_seconds.or(self.query.number("gracePeriodSeconds"));
        if options.propagation_policy.is_none() {
            options.propagation_policy = self.query.text("propagationPolicy").map(str::to_owned);
        }
        Ok(options)
    }

    fn delete(&self, name: &str) -> Result<Response<Body>, ApiError> {
        let written = self.request().delete(name, &self.delete_options()?)?;
        let kind = self.route.kind;
        // As in the real server: an object that still exists is returned, a removed one is
        // confirmed.
        let answer = match written.removed && !kind.returns_deleted {
            true => view::deleted(kind, &written.object),
            false => self.view.object(kind, &written.object),
        };
        json(StatusCode::OK, &answer)
    }

    fn delete_all(&self) -> Result<Response<Body>, ApiError> {
        let (kind, selector, options) = (self.route.kind, self.selector()?, self.delete_options()?);
        let listed = self.shared.store.list(kind.table, selector.namespace.as_deref());
        let chosen: Vec<&Value> = listed
            .objects
            .iter()
            .map(AsRef::as_ref)
            .filter(|object| selector.matches(object))
            .collect();
        for object in &chosen {
            let request = Request { namespace: meta::namespace(object), ..self.request() };
            match request.delete(meta::name(object), &options) {
                Err(error) if error.reason != "NotFound" => return Err(error),
                _ => {}
            }
        }
        let metadata = view::list_metadata(self.shared.store.revision());
        respond(
            StatusCode::OK,
            "application/json",
            self.view.list(kind, chosen.into_iter(), metadata)?,
        )
    }

    pub(crate) fn written(&self, written: &Written) -> Result<Response<Body>, ApiError> {
        let status = if written.created { StatusCode::CREATED } else { StatusCode::OK };
        json(status, &self.view.object(self.route.kind, &written.object))
    }
}

/// Decodes a raw object by its schema into the stored form.
///
/// # Errors
/// Returns 400 for another kind, a field of the wrong type, or (strict) an unknown field.
fn decode(kind: &Kind, mut raw: Value, strict: bool) -> Result<Value, ApiError> {
    if !raw.is_object() {
        return Err(ApiError::bad_request("request body is not an object"));
    }
    for (field, expected) in [("apiVersion", kind.api_version()), ("kind", kind.kind.to_owned())] {
        match raw[field].as_str() {
            None | Some("") => raw[field] = expected.into(),
            Some(got) if got != expected => {
                return Err(ApiError::bad_request(format!(
                    "the {field} in the data ({got}) does not match the expected {field} ({expected})"
                )));
            }
            Some(_) => {}
        }
    }
    let decoded = (kind.decode)(raw).map_err(|error| {
        ApiError::bad_request(format!(
            "{} in version \"{}\" cannot be handled as a {}: {error}",
            kind.kind, kind.version, kind.kind
        ))
    })?;
    if strict && !decoded.unknown.is_empty() {
        let unknown: Vec<String> =
            decoded.unknown.iter().map(|path| format!("unknown field \"{path}\"")).collect();
        return Err(ApiError::bad_request(format!(
            "strict decoding error: {}",
            unknown.join(", ")
        )));
    }
    Ok(match kind.store {
        Some(store) => store(decoded.object),
        None => decoded.object,
    })
}

/// Position of a paged list.
struct Continue {
    revision: u64,
    after: (String, String),
}

impl Continue {
    fn parse(text: &str) -> Result<Self, ApiError> {
        let parsed = || {
            let mut parts = text.splitn(3, ':');
            let revision = parts.next()?.parse().ok()?;
            Some(Self { revision, after: (parts.next()?.to_owned(), parts.next()?.to_owned()) })
        };
        parsed().ok_or_else(|| ApiError::bad_request("continue key is not valid"))
    }
}

impl std::fmt::Display for Continue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}", self.revision, self.after.0, self.after.1)
    }
}

fn text_header<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

pub(crate) fn json(status: StatusCode, body: &Value) -> Result<Response<Body>, ApiError> {
    respond(status, "application/json", body.to_string())
}

pub(crate) fn respond(
    status: StatusCode,
    media_type: &str,
    body: impl Into<Body>,
) -> Result<Response<Body>, ApiError> {
    Response::builder()
        .status(status)
        .header(CONTENT_TYPE, media_type)
        .body(body.into())
        .map_err(|error| ApiError::internal(error.to_string()))
}

fn failure(error: &ApiError) -> Response<Body> {
    let mut response = Response::new(Body::from(error.status().to_string()));
    *response.status_mut() =
        StatusCode::from_u16(error.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response
        .headers_mut()
        .insert(CONTENT_TYPE, axum::http::HeaderValue::from_static("application/json"));
    response
}
