//! The interceptor in the driver's place, and in both places: `helm upgrade` there and back, with
//! pods that run through it.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::bench::{Bench, from_template};
use super::driver_instances::DriverInstances;
use super::release::{helm, unnoticed};
use crate::harness::TrialOutcome;
use crate::helm::Helm;
use crate::runner::Outcome;

const GRANTED: u64 = 1 << 30;

/// Where it stands, where the real libcuda is then, and what programs get past it.
struct Mode {
    name: &'static str,
    real: &'static str,
    escapes: &'static [&'static str],
}

const IN_IMAGES: &str = "/usr/lib/x86_64-linux-gnu/libcuda.so.1";
const BEHIND_PROXY: &str = "/usr/local/lib/tessera/driver/libcuda.so.1";

/// As docs/reference/intercept-bypasses.md has it. That preloaded it does not hold some shows that
/// each is a way.
const MODES: [Mode; 3] = [
    Mode {
        name: "preload",
        real: IN_IMAGES,
        escapes: &[
            "the loader's `dlsym`, from the tables of libc",
            "the tables of the library that `dlopen` gives",
            "a plugin opened with `RTLD_DEEPBIND` that is linked with libcuda",
            "a plugin opened with `RTLD_DEEPBIND` that uses `dlsym`",
            "the tables of the real driver by its path",
        ],
    },
    Mode {
        name: "proxy",
        real: BEHIND_PROXY,
        escapes: &[
            "the real driver by its path, and `dlsym`",
            "the tables of the real driver by its path",
        ],
    },
    Mode {
        name: "both",
        real: BEHIND_PROXY,
        escapes: &["the tables of the real driver by its path"],
    },
];

pub(super) async fn there_and_back(bench: Bench) -> TrialOutcome {
    let helm = helm()?;
    bench.template("share", "a100.gpu.tessera.dev", json!({"memory": "1Gi", "cores": "1"})).await?;
    let [preload, others @ ..] = MODES;
    let mut running = vec![holds(&bench, &preload).await?];
    let there = async {
        for mode in &others {
            stand(&bench, &helm, &[&format!("driver.intercept={}", mode.name)], mode).await?;
            running.push(holds(&bench, mode).await?);
        }
        anyhow::Ok(())
    };
    let there = there.await;
    // Whatever was seen, the others find the cluster as it was.
    stand(&bench, &helm, &[], &preload).await?;
    there?;
    for pod in &running {
        unnoticed(&bench, pod).await?;
    }
    bench.holder("after", "share").await?;
    bench.holds("after").await?;
    let pods = bench.pods().list(&Default::default()).await?;
    bench.delete(&pods.into_iter().filter_map(|pod| pod.metadata.name).collect::<Vec<_>>()).await?;
    Ok(Outcome::Held(vec![]))
}

/// Has the drivers stand it there.
async fn stand(bench: &Bench, helm: &Helm, settings: &[&str], mode: &Mode) -> anyhow::Result<()> {
    helm.upgrade(settings).await?;
    DriverInstances::of(&bench.client).run_with(&format!("--intercept={}", mode.name)).await
}

/// New pods get what their share has, by the ways that are held; one of them runs on.
async fn holds(bench: &Bench, mode: &Mode) -> anyhow::Result<Pod> {
    let name = |of: &str| format!("{}-{of}", mode.name);
    bench.create(pod(&name("fills"), &["tessera-probe", "fill"])).await?;
    let ways = ["/guests/bypasses", "/nowhere", mode.real, "/guests/linkedplugin.so"];
    bench.create(pod(&name("ways"), &ways)).await?;
    bench.holder(&name("stays"), "share").await?;

    let filled = lines(bench, &name("fills")).await?;
    let filled = filled.iter().find(|line| line["event"] == "filled").cloned().unwrap_or_default();
    for field in ["takenBytes", "nvmlUsedBytes", "nvmlTotalBytes"] {
        // Were memory charged twice, it would be refused at half of it.
        anyhow::ensure!(filled[field] == GRANTED, "{}: {field} of {GRANTED}: {filled}", mode.name);
    }
    let ways = lines(bench, &name("ways")).await?;
    anyhow::ensure!(ways.len() > 10, "{}: only {ways:?}", mode.name);
    for way in ways {
        let escapes = way["route"].as_str().is_some_and(|route| mode.escapes.contains(&route));
        // `CUDA_ERROR_OUT_OF_MEMORY`.
        anyhow::ensure!(way["result"] == if escapes { 0 } else { 2 }, "{}: {way}", mode.name);
    }
    bench.holds(&name("stays")).await
}

async fn lines(bench: &Bench, pod: &str) -> anyhow::Result<Vec<Value>> {
    let lines = bench.output_of(pod).await?;
    Ok(lines.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?)
}

fn pod(name: &str, command: &[&str]) -> Value {
    let mut pod = from_template(name, "share");
    let container = &mut pod["spec"]["containers"][0];
    container["image"] = "tessera/guests:e2e".into();
    container["command"] = command.into();
    pod
}
