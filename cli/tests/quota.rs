//! Quotas and their use.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;

use fixture::{Fixture, device, golden, share};
use serde_json::json;
use tessera_allocator::PlanSettings;
use tessera_api::names::{Namespace, PodName};
use tessera_cli::explain::{self, PlanView};
use tessera_cli::output::{OutputFormat, render};
use tessera_cli::quota::{self, QuotaReport};
use tessera_cli::simulate;

/// A namespace with two quotas, two tenants, and two pods that wait.
fn fixture() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.quota("memory", json!({"memory": "40Gi", "cores": "200"}));
    fixture.quota("whole", json!({"gpus": 1}));
    fixture.tenant("trainer", "node-a", &device("aa"), "30Gi", "25");
    fixture.tenant("batch", "node-b", &device("ba"), "80Gi", "0");
    fixture.pending("small", share("4Gi", "0"));
    fixture.pending("cores", share("0", "20"));
    fixture
}

fn report(fixture: &Fixture, namespace: Option<&str>) -> QuotaReport {
    let indexed = fixture.snapshot.indexed();
    let now = fixture.snapshot.taken_at;
    let view = PlanView::new(&fixture.snapshot, &indexed, PlanSettings::default(), now);
    let namespace = namespace.map(|name| Namespace::new(name).unwrap());
    QuotaReport::new(&view, namespace.as_ref())
}

#[test]
fn quotas_show_use_limits_and_pods_that_wait() {
    golden("quota.txt", &quota::text(&report(&fixture(), Some("team-a")), true));
    let report = report(&fixture(), None);
    golden("quota.json", &render(&report, OutputFormat::Json, |_| String::new()).unwrap());
}

#[test]
fn a_namespace_without_quotas_is_named() {
    let text = quota::text(&report(&fixture(), Some("team-b")), true);
    assert!(text.starts_with("namespace team-b has no GpuQuota"), "{text}");
}

#[test]
fn explain_names_the_quota_and_what_to_do() {
    let fixture = fixture();
    let indexed = fixture.snapshot.indexed();
    let now = fixture.snapshot.taken_at;
    let view = PlanView::new(&fixture.snapshot, &indexed, PlanSettings::default(), now);
    let (team, pod) = (Namespace::new("team-a").unwrap(), PodName::new("small").unwrap());
    let report = explain::pod(&view, &team, &pod, &[]).unwrap();
    golden("explain-quota.txt", &explain::pod_text(&report, now));
    assert_eq!(report.claims[0].reason, "QuotaExceeded");
}

#[test]
fn simulate_holds_pods_to_quotas_of_files() {
    let mut fixture = fixture();
    fixture.snapshot.gpu_quotas.clear();
    let manifest = |hard: &str| {
        format!(
            "apiVersion: gpu.tessera.dev/v1alpha1\nkind: GpuQuota\nmetadata: {{name: q}}\n\
             spec: {{hard: {{memory: {hard}}}}}\n---\n\
             apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: c}}\n\
             spec: {{devices: {{requests: [{}]}}}}\n---\n\
             apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\n\
             spec: {{containers: [{{name: c, image: i}}], resourceClaims: \
             [{{name: gpu, resourceClaimName: c}}]}}\n",
            share("5Gi", "0")
        )
    };
    let team = Namespace::new("team-a").unwrap();
    let fits = |hard: &str| {
        let (snapshot, settings) = (&fixture.snapshot, PlanSettings::default());
        simulate::simulate(snapshot, &manifest(hard), &team, settings, false).unwrap().fits()
    };
    assert!(fits("200Gi"));
    assert!(!fits("118Gi"), "110 Gi are used, and the pending pod gets 4");
}
