//! Trial that restarts each component of the control plane. Pods exist before, and others are
//! created meanwhile.

use futures::future::try_join_all;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use super::test_bed::{Skip, TestBed, holder};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::operations::Operations;
use crate::runner::Outcome;

const CONTROL_PLANE: &str = "control-plane";
/// Signal, components, and the number of pods created meanwhile. A stopped API server completes the
/// requests of its connected clients and refuses new connections.
const RESTARTS: [(&str, &[&str], usize); 4] = [
    ("stop", &["kube-apiserver"], 4),
    ("kill", &["kube-apiserver"], 4),
    ("kill", &["etcd"], 4),
    ("kill", &["kube-controller-manager", "kube-scheduler"], 30),
];

/// Returns the operations on the machine of the control plane; the trial is skipped without it.
pub(super) async fn operations_on(test_bed: &TestBed) -> anyhow::Result<&Operations> {
    let operations = test_bed.operations()?;
    if operations.run(&["usage", CONTROL_PLANE, "etcd"]).await.is_err() {
        return Err(Skip("the control plane cannot be restarted from this machine".into()).into());
    }
    Ok(operations)
}

pub(super) async fn restarted(test_bed: TestBed) -> TrialOutcome {
    let operations = operations_on(&test_bed).await?;
    test_bed.create_template("share", DRIVER, json!({"memory": "2Gi", "cores": "2"})).await?;
    test_bed.create_holder("before", "share").await?;
    let mut running = vec![test_bed.wait_running("before").await?];
    for (how, components, pods) in RESTARTS {
        let names: Vec<_> =
            (0..pods).map(|number| format!("{how}-{}-{number}", components[0])).collect();
        let restart = async {
            for component in components {
                operations.run(&[how, CONTROL_PLANE, component]).await?;
            }
            for component in components {
                operations.run(&["start", CONTROL_PLANE, component]).await?;
            }
            anyhow::Ok(())
        };
        let create = async {
            for name in &names {
                create(&test_bed, name).await?;
            }
            anyhow::Ok(())
        };
        tokio::try_join!(restart, create)?;
        running.extend(try_join_all(names.iter().map(|name| test_bed.wait_running(name))).await?);
    }
    for pod in &running {
        test_bed.check_undisturbed(pod).await?;
    }
    let names = running.iter().filter_map(|pod| pod.metadata.name.clone()).collect::<Vec<_>>();
    for name in &names {
        test_bed.pods().delete(name, &DeleteParams::default()).await?;
    }
    Ok(Outcome::Passed(vec![]))
}

/// Creates a pod, and retries until the API server responds.
async fn create(test_bed: &TestBed, name: &str) -> anyhow::Result<()> {
    let pod = serde_json::from_value(holder(
        name,
        json!({"name": "gpu", "resourceClaimTemplateName": "share"}),
    ))?;
    let mut ticks = tokio::time::interval(std::time::Duration::from_millis(200));
    loop {
        ticks.tick().await;
        match test_bed.pods().create(&PostParams::default(), &pod).await {
            Ok(_) => return Ok(()),
            // An earlier attempt succeeded without a response.
            Err(kube::Error::Api(status)) if status.is_already_exists() => return Ok(()),
            // A restarted API server may not know all resources and roles yet.
            Err(kube::Error::Api(status))
                if status.code < 500 && !matches!(status.code, 403 | 429) =>
            {
                return Err(kube::Error::Api(status).into());
            }
            Err(_) => {}
        }
    }
}
