//! Device health, streamed to the kubelet, which shows it in
//! `containerStatuses[].allocatedResourcesStatus`.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, stream};
use tessera_proto::{health_v1, health_v1alpha1};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// Interval at which an unchanged report is sent again. By default, the kubelet considers health
/// older than 30 s unknown (`DefaultHealthTimeout`).
const REPEAT: Duration = Duration::from_secs(10);

/// The health of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceHealth {
    /// The pool.
    pub pool: String,
    /// The name in the pool.
    pub device: String,
    /// True if the device is healthy, `None` if that is not known.
    pub healthy: Option<bool>,
    /// The problem, in at most 1024 characters.
    pub message: String,
}

/// The health of all devices at a point in time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthReport {
    /// The time, in Unix seconds.
    pub checked_at: i64,
    /// All devices, also missing devices that claims still use.
    pub devices: Vec<DeviceHealth>,
}

/// The health services.
#[derive(Clone, Debug)]
pub struct HealthService {
    reports: watch::Receiver<Arc<HealthReport>>,
    stop: CancellationToken,
}

impl HealthService {
    /// Returns services that stream `reports` until `stop`. A stream that does not end would keep
    /// the server from stopping.
    #[must_use]
    pub fn new(reports: watch::Receiver<Arc<HealthReport>>, stop: CancellationToken) -> Self {
        Self { reports, stop }
    }

    /// Returns a stream of the present report, then one at each change and after each [`REPEAT`].
    fn stream(&self) -> impl Stream<Item = Arc<HealthReport>> + Send + use<> {
        let state = (self.reports.clone(), self.stop.clone(), true);
        stream::unfold(state, |(mut reports, stop, first)| async move {
            if !first {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return None,
                    changed = reports.changed() => changed.ok()?,
                    () = tokio::time::sleep(REPEAT) => {}
                }
            }
            let report = Arc::clone(&reports.borrow_and_update());
            Some((report, (reports, stop, false)))
        })
    }
}

macro_rules! serve {
    ($version:ident) => {
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for HealthService {
            type NodeWatchResourcesStream = Pin<
                Box<dyn Stream<Item = Result<$version::NodeWatchResourcesResponse, Status>> + Send>,
            >;

            async fn node_watch_resources(
                &self,
                _: Request<$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                use futures::StreamExt;
                let device = |checked_at: i64, device: &DeviceHealth| $version::DeviceHealth {
                    device: Some($version::DeviceIdentifier {
                        pool_name: device.pool.clone(),
                        device_name: device.device.clone(),
                    }),
                    health: match device.healthy {
                        Some(true) => $version::HealthStatus::Healthy,
                        Some(false) => $version::HealthStatus::Unhealthy,
                        None => $version::HealthStatus::Unknown,
                    }
                    .into(),
                    last_updated_time: checked_at,
                    health_check_timeout_seconds: 0,
                    message: device.message.clone(),
                };
                let messages = self.stream().map(move |report| {
                    let devices = report
                        .devices
                        .iter()
                        .map(|found| device(report.checked_at, found))
                        .collect();
                    Ok($version::NodeWatchResourcesResponse { devices })
                });
                Ok(Response::new(Box::pin(messages)))
            }
        }
    };
}

serve!(health_v1);
serve!(health_v1alpha1);
