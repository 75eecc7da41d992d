//! Metrics of kube-scheduler.

use anyhow::Context;
use kube::core::Request;
use kube::{Client, Config};

/// URL of kube-scheduler's metrics: the loopback of this machine, with a self-signed certificate.
const SERVER: &str = "https://127.0.0.1:10259";

/// Metric of the scheduling attempts, by result.
const ATTEMPTS: &str = "scheduler_schedule_attempts_total";

/// Returns the number of failed scheduling attempts.
pub(super) async fn failed_attempts() -> anyhow::Result<f64> {
    let mut config = Config::new(SERVER.parse()?);
    config.accept_invalid_certs = true;
    let client = Client::try_from(config)?;
    let metrics = client.request_text(Request::new("").get("metrics", &Default::default())?).await;
    let metrics = metrics
        .with_context(|| format!("cannot read the metrics of kube-scheduler at {SERVER}"))?;
    Ok(sum_failed(&metrics))
}

/// Returns the sum over all results other than `scheduled`.
fn sum_failed(metrics: &str) -> f64 {
    let attempts = metrics.lines().filter_map(|line| line.strip_prefix(ATTEMPTS));
    let failed = attempts.filter(|sample| !sample.contains("result=\"scheduled\""));
    failed.filter_map(|sample| sample.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::sum_failed;

    #[test]
    fn counts_errors_and_unschedulable_pods_as_failed() {
        let metrics = [
            "# TYPE scheduler_schedule_attempts_total counter",
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"error\"} 2",
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"scheduled\"} 501",
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"unschedulable\"} 28",
            "scheduler_pending_pods{queue=\"active\"} 9",
        ];
        assert!((sum_failed(&metrics.join("\n")) - 30.0).abs() < 1e-9);
        assert!(sum_failed("").abs() < 1e-9);
    }
}
