//! What kube-scheduler says about itself.

use anyhow::Context;
use kube::core::Request;
use kube::{Client, Config};

/// Where it serves its metrics: on the loopback of its machine, which is this one's, with a
/// certificate that it signed itself.
const SERVER: &str = "https://127.0.0.1:10259";

/// Its attempts at pods, by result.
const ATTEMPTS: &str = "scheduler_schedule_attempts_total";

/// How many of its attempts at a pod have come to nothing.
pub(super) async fn attempts_in_vain() -> anyhow::Result<f64> {
    let mut config = Config::new(SERVER.parse()?);
    config.accept_invalid_certs = true;
    let client = Client::try_from(config)?;
    let metrics = client.request_text(Request::new("").get("metrics", &Default::default())?).await;
    let metrics = metrics
        .with_context(|| format!("cannot read the metrics of kube-scheduler at {SERVER}"))?;
    Ok(in_vain(&metrics))
}

/// The sum of all results but one.
fn in_vain(metrics: &str) -> f64 {
    let attempts = metrics.lines().filter_map(|line| line.strip_prefix(ATTEMPTS));
    let failed = attempts.filter(|sample| !sample.contains("result=\"scheduled\""));
    failed.filter_map(|sample| sample.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::in_vain;

    #[test]
    fn errors_and_pods_that_fit_nowhere_are_in_vain() {
        let metrics = [
            "# TYPE scheduler_schedule_attempts_total counter",
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"error\"} 2",
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"scheduled\"} 501",
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"unschedulable\"} 28",
            "scheduler_pending_pods{queue=\"active\"} 9",
        ];
        assert!((in_vain(&metrics.join("\n")) - 30.0).abs() < 1e-9);
        assert!(in_vain("").abs() < 1e-9);
    }
}
