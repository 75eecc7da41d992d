//! Short random attacks with fixed seeds.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use tessera_attacks::attack::{self, AttackPlan, AttackReport, Target};
use tessera_attacks::cluster::AttackedCluster;
use tessera_test_support::{report_skip, test_name};

const PLAN: AttackPlan = AttackPlan {
    seed: 1,
    peace: Duration::from_secs(3),
    attack: Duration::from_secs(10),
    interval: Duration::from_secs(1),
    workers: 4,
    objects: 10,
    rate: None,
    classes: true,
    restart_every: None,
};

/// Most memory of the controller and of a driver, in MiB.
const MEMORY_MIB: [f64; 2] = [256.0, 64.0];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_attack_violates_no_invariant() {
    let Some(report) = attack(test_name!(), PLAN).await else { return };
    assert_eq!(report.leader_changes, 0, "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_if_the_controller_restarts_meanwhile() {
    let restart_every = Some(Duration::from_secs(4));
    let plan = AttackPlan { seed: 2, attack: Duration::from_secs(14), restart_every, ..PLAN };
    let Some(report) = attack(test_name!(), plan).await else { return };
    assert!(report.restarts >= 2, "killed and stopped: {report}");
    assert!(report.leader_changes >= 2, "each restart is observed: {report}");
}

/// Attacks a new cluster, and checks what holds after each attack. `None` if this machine cannot
/// run one, which is reported as a skipped test.
async fn attack(test: &str, plan: AttackPlan) -> Option<AttackReport> {
    let cluster = match AttackedCluster::start().await.unwrap() {
        Ok(cluster) => cluster,
        Err(reason) => {
            report_skip(test, reason);
            return None;
        }
    };
    let target = Target::simulated(&cluster).unwrap();
    let report = attack::run(&target, plan, |_| {}).await.unwrap();
    eprintln!("{report}");
    assert!(report.violations.is_empty(), "{report}");
    assert!(report.peace.pods > 0 && report.attack.pods > 0, "{report}");
    assert!(report.requests.len() > 6, "the attacker did little: {report}");
    for process in &report.processes {
        let most = MEMORY_MIB[usize::from(process.process.starts_with("tessera-driver"))];
        assert!(process.peak_rss_mib < most, "{process:?}, limit {most} MiB");
    }
    cluster.stop().await.unwrap();
    Some(report)
}
