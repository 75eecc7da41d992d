//! The server of the webhook.
//!
//! Every pod of the cluster may reach its port, so memory is bounded: the bodies that are read at a
//! time have 64 MiB at most, and a review waits until its body fits.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tessera_admission::configuration::{CONVERT_PATH, VALIDATE_PATH};
use tessera_admission::review::{MAX_REVIEW_BYTES, ReviewError, ReviewResult, review};
use tessera_admission::validate::validate;
use tessera_api::metrics;
use tessera_dialect::{AdmissionTask, Converter};
use tessera_runtime::server::http::{HttpServer, ServerLimits};
use tessera_runtime::server::tls::server_config;
use tessera_runtime::supervisor::Supervisor;
use tokio::sync::{Semaphore, oneshot};

use super::certificate::ServedCertificate;
use crate::metrics::add;

/// Connections: kube-apiserver has a pool for each entry of the configuration, and in a burst a
/// connection for each pod.
const LIMITS: ServerLimits = ServerLimits {
    connections: 1024,
    connections_per_address: 512,
    head_timeout: Duration::from_secs(5),
    // kube-apiserver waits for 10 s.
    total_timeout: Duration::from_secs(10),
};

/// Bytes of all bodies that are read at a time. A review has a few KiB.
const BODIES: usize = 64 << 20;

/// Unit in which bodies are counted, in bytes.
const UNIT: usize = 1 << 10;

/// Buckets of the time of a review, from 0.1 ms to 0.4 s.
const BUCKETS: [f64; 7] = [0.0001, 0.0004, 0.0016, 0.0064, 0.0256, 0.1, 0.4];

/// Labels of the number of reviews.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReviewLabels {
    /// The dialect, or `unknown-dialect`; empty for a GpuConfig.
    dialect: String,
    /// The result, or `malformed`.
    result: &'static str,
}

/// Metrics of the webhook. Clones share them.
#[derive(Debug, Clone)]
struct ReviewMetrics {
    reviews: Family<ReviewLabels, Counter>,
    duration: Histogram,
}

impl ReviewMetrics {
    fn new(registry: &mut Registry, expiry: Gauge) -> Self {
        let created = Self { reviews: Family::default(), duration: Histogram::new(BUCKETS) };
        add(registry, metrics::CONTROLLER_ADMISSION_REVIEWS, created.reviews.clone());
        add(registry, metrics::CONTROLLER_ADMISSION_REVIEW, created.duration.clone());
        add(registry, metrics::CONTROLLER_WEBHOOK_CERTIFICATE_EXPIRY, expiry);
        created
    }

    fn count(&self, dialect: &str, result: Option<ReviewResult>) {
        let result = result.map_or("malformed", ReviewResult::name);
        let labels = ReviewLabels { dialect: dialect.to_owned(), result };
        self.reviews.get_or_create(&labels).inc();
    }
}

#[derive(Debug, Clone)]
struct Reviewer {
    /// None without dialects.
    converter: Option<Arc<Converter>>,
    metrics: ReviewMetrics,
    /// Units of bodies that are free.
    bodies: Arc<Semaphore>,
}

/// A webhook that is served.
#[derive(Debug)]
pub struct ServedWebhook {
    /// The bound address.
    pub address: SocketAddr,
    ended: oneshot::Receiver<()>,
}

impl ServedWebhook {
    /// Waits until the reviews that had begun when the tasks stopped are answered.
    pub async fn ended(self) {
        // The sender is dropped with the thread.
        let _ = self.ended.await;
    }
}

/// Serves reviews on a thread of `tasks` until they stop.
///
/// # Errors
/// The address cannot be bound, or the thread cannot be started.
pub fn serve(
    address: SocketAddr,
    converter: Option<Arc<Converter>>,
    certificate: Arc<ServedCertificate>,
    registry: &mut Registry,
    tasks: &mut Supervisor,
) -> io::Result<ServedWebhook> {
    let metrics = ReviewMetrics::new(registry, certificate.expiry());
    let bodies = Arc::new(Semaphore::new(BODIES / UNIT));
    let routes = routes(Reviewer { converter, metrics, bodies });
    let config = Arc::new(server_config(certificate));
    let server = HttpServer::bind(address)?.with_limits(LIMITS).with_tls(config);
    let address = server.address();
    tracing::info!(%address, "serving the admission webhook");
    let (stop, (send_ended, ended)) = (tasks.stop_token(), oneshot::channel());
    tasks.spawn_thread("webhook", move || {
        let _ended: oneshot::Sender<()> = send_ended;
        if let Err(error) = server.run(routes, &stop) {
            tracing::error!(%error, server = "webhook", "server failed");
        }
    })?;
    Ok(ServedWebhook { address, ended })
}

fn routes(reviewer: Reviewer) -> Router {
    Router::new()
        .route(&format!("{CONVERT_PATH}{{task}}"), post(convert))
        .route(VALIDATE_PATH, post(validate_configs))
        .with_state(reviewer)
}

async fn convert(
    State(reviewer): State<Reviewer>,
    Path(task): Path<String>,
    request: Request,
) -> Response {
    let (Some(task), Some(converter)) = (AdmissionTask::named(&task), &reviewer.converter) else {
        return (StatusCode::NOT_FOUND, "no dialect of this name\n").into_response();
    };
    reviewer.answer(&task.to_string(), request, |body| review(converter, task, body)).await
}

async fn validate_configs(State(reviewer): State<Reviewer>, request: Request) -> Response {
    reviewer.answer("", request, validate).await
}

impl Reviewer {
    /// Answers a request by `review`, for a dialect or none.
    async fn answer(
        &self,
        dialect: &str,
        request: Request,
        review: impl FnOnce(&[u8]) -> Result<(Vec<u8>, ReviewResult), ReviewError>,
    ) -> Response {
        let limit = length(request.headers()).unwrap_or(MAX_REVIEW_BYTES).min(MAX_REVIEW_BYTES);
        let units = u32::try_from(limit.div_ceil(UNIT)).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        let _units = self.bodies.acquire_many(units).await.ok();
        let Ok(body) = axum::body::to_bytes(request.into_body(), limit).await else {
            let text =
                format!("the body has more than {MAX_REVIEW_BYTES} bytes, or has not arrived\n");
            return (StatusCode::PAYLOAD_TOO_LARGE, text).into_response();
        };
        let started = Instant::now();
        let reviewed = review(&body);
        self.metrics.duration.observe(started.elapsed().as_secs_f64());
        self.metrics.count(dialect, reviewed.as_ref().ok().map(|(_, result)| *result));
        match reviewed {
            Ok((answer, _)) => {
                ([(header::CONTENT_TYPE, "application/json")], Body::from(answer)).into_response()
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "cannot review a request");
                (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response()
            }
        }
    }
}

/// Returns the announced length of a body, in bytes.
fn length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
