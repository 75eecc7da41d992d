//! Each component of the control plane ended and started again, with pods before and in the middle.

use futures::future::try_join_all;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use super::bench::{Bench, Skip, holder};
use super::release::unnoticed;
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;

const CONTROL_PLANE: &str = "control-plane";
/// How what is ended, and how many pods are created meanwhile. An API server that is stopped serves
/// those to their end who are connected, and nobody else.
const ENDED: [(&str, &[&str], usize); 4] = [
    ("stop", &["kube-apiserver"], 4),
    ("kill", &["kube-apiserver"], 4),
    ("kill", &["etcd"], 4),
    ("kill", &["kube-controller-manager", "kube-scheduler"], 30),
];

pub(super) async fn restarted(bench: Bench) -> TrialOutcome {
    let hands = bench.hands()?;
    if hands.run(&["usage", CONTROL_PLANE, "etcd"]).await.is_err() {
        return Err(Skip("the control plane is not ours to restart".into()).into());
    }
    bench.template("share", DRIVER, json!({"memory": "2Gi", "cores": "2"})).await?;
    bench.holder("before", "share").await?;
    let mut running = vec![bench.holds("before").await?];
    for (how, components, pods) in ENDED {
        let names: Vec<_> =
            (0..pods).map(|number| format!("{how}-{}-{number}", components[0])).collect();
        let restart = async {
            for component in components {
                hands.run(&[how, CONTROL_PLANE, component]).await?;
            }
            for component in components {
                hands.run(&["start", CONTROL_PLANE, component]).await?;
            }
            anyhow::Ok(())
        };
        let create = async {
            for name in &names {
                create(&bench, name).await?;
            }
            anyhow::Ok(())
        };
        tokio::try_join!(restart, create)?;
        running.extend(try_join_all(names.iter().map(|name| bench.holds(name))).await?);
    }
    for pod in &running {
        unnoticed(&bench, pod).await?;
    }
    let names = running.iter().filter_map(|pod| pod.metadata.name.clone()).collect::<Vec<_>>();
    for name in &names {
        bench.pods().delete(name, &DeleteParams::default()).await?;
    }
    Ok(Outcome::Held(vec![]))
}

/// Creates a pod, again and again while there is nobody to answer.
async fn create(bench: &Bench, name: &str) -> anyhow::Result<()> {
    let pod = serde_json::from_value(holder(
        name,
        json!({"name": "gpu", "resourceClaimTemplateName": "share"}),
    ))?;
    let mut ticks = tokio::time::interval(std::time::Duration::from_millis(200));
    loop {
        ticks.tick().await;
        match bench.pods().create(&PostParams::default(), &pod).await {
            Ok(_) => return Ok(()),
            // An earlier attempt was carried out without an answer.
            Err(kube::Error::Api(status)) if status.is_already_exists() => return Ok(()),
            // An API server that has just started does not know every resource and role at once.
            Err(kube::Error::Api(status))
                if status.code < 500 && !matches!(status.code, 403 | 429) =>
            {
                return Err(kube::Error::Api(status).into());
            }
            Err(_) => {}
        }
    }
}
