//! Trial of the injection modes. `helm upgrade` switches to proxy, both, and back to preload while
//! pods run.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::driver_instances::DriverInstances;
use super::release::helm;
use super::test_bed::{A100, TestBed, from_template};
use crate::harness::TrialOutcome;
use crate::helm::Helm;
use crate::runner::Outcome;

const GRANTED: u64 = 1 << 30;

/// An injection mode, the path of the real libcuda in it, and the known bypasses.
struct InjectionMode {
    name: &'static str,
    libcuda_path: &'static str,
    bypasses: &'static [&'static str],
}

const IN_IMAGES: &str = "/usr/lib/x86_64-linux-gnu/libcuda.so.1";
const BEHIND_PROXY: &str = "/usr/local/lib/tessera/driver/libcuda.so.1";

/// Known bypasses as listed in docs/reference/intercept-bypasses.md. The routes that preload does
/// not intercept show that the test program uses each of them.
const MODES: [InjectionMode; 3] = [
    InjectionMode {
        name: "preload",
        libcuda_path: IN_IMAGES,
        bypasses: &[
            "the loader's `dlsym`, from the tables of libc",
            "the tables of the library that `dlopen` gives",
            "a plugin opened with `RTLD_DEEPBIND` that is linked with libcuda",
            "a plugin opened with `RTLD_DEEPBIND` that uses `dlsym`",
            "the tables of the real driver by its path",
        ],
    },
    InjectionMode {
        name: "proxy",
        libcuda_path: BEHIND_PROXY,
        bypasses: &[
            "the real driver by its path, and `dlsym`",
            "the tables of the real driver by its path",
        ],
    },
    InjectionMode {
        name: "both",
        libcuda_path: BEHIND_PROXY,
        bypasses: &["the tables of the real driver by its path"],
    },
];

pub(super) async fn switched_and_restored(test_bed: TestBed) -> TrialOutcome {
    let helm = helm()?;
    test_bed.create_template("share", A100, json!({"memory": "1Gi", "cores": "1"})).await?;
    let [preload, others @ ..] = MODES;
    let mut running = vec![check_limits(&test_bed, &preload).await?];
    let outcome = async {
        for mode in &others {
            switch_mode(&test_bed, &helm, &[&format!("driver.intercept={}", mode.name)], mode)
                .await?;
            running.push(check_limits(&test_bed, mode).await?);
        }
        anyhow::Ok(())
    };
    let outcome = outcome.await;
    // Restore the mode in every case; later trials need it.
    switch_mode(&test_bed, &helm, &[], &preload).await?;
    outcome?;
    for pod in &running {
        test_bed.check_undisturbed(pod).await?;
    }
    test_bed.start_holder("after", "share").await?;
    let pods = test_bed.pods().list(&Default::default()).await?;
    test_bed
        .delete(&pods.into_iter().filter_map(|pod| pod.metadata.name).collect::<Vec<_>>())
        .await?;
    Ok(Outcome::Passed(vec![]))
}

/// Switches the drivers to the mode.
async fn switch_mode(
    test_bed: &TestBed,
    helm: &Helm,
    settings: &[&str],
    mode: &InjectionMode,
) -> anyhow::Result<()> {
    helm.upgrade(settings).await?;
    DriverInstances::new(&test_bed.client)
        .wait_argument(&format!("--intercept={}", mode.name))
        .await
}

/// Checks that new pods are limited to their share except by known bypasses. One of the pods keeps
/// running.
async fn check_limits(test_bed: &TestBed, mode: &InjectionMode) -> anyhow::Result<Pod> {
    let name = |of: &str| format!("{}-{of}", mode.name);
    test_bed.create(pod(&name("fill"), &["tessera-probe", "fill"])).await?;
    let routes =
        ["/executables/bypasses", "/nowhere", mode.libcuda_path, "/executables/linkedplugin.so"];
    test_bed.create(pod(&name("routes"), &routes)).await?;
    test_bed.create_holder(&name("hold"), "share").await?;

    let filled = json_lines(test_bed, &name("fill")).await?;
    let filled = filled.iter().find(|line| line["event"] == "filled").cloned().unwrap_or_default();
    for field in ["takenBytes", "nvmlUsedBytes", "nvmlTotalBytes"] {
        // Memory charged twice would be refused at half of the share.
        anyhow::ensure!(
            filled[field] == GRANTED,
            "{}: expected {field} {GRANTED}: {filled}",
            mode.name
        );
    }
    let routes = json_lines(test_bed, &name("routes")).await?;
    anyhow::ensure!(routes.len() > 10, "{}: expected more than 10 routes: {routes:?}", mode.name);
    for route in routes {
        let is_bypass = route["route"].as_str().is_some_and(|name| mode.bypasses.contains(&name));
        // `CUDA_ERROR_OUT_OF_MEMORY`.
        anyhow::ensure!(route["result"] == if is_bypass { 0 } else { 2 }, "{}: {route}", mode.name);
    }
    test_bed.wait_running(&name("hold")).await
}

async fn json_lines(test_bed: &TestBed, pod: &str) -> anyhow::Result<Vec<Value>> {
    let lines = test_bed.output_of(pod).await?;
    Ok(lines.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?)
}

fn pod(name: &str, command: &[&str]) -> Value {
    let mut pod = from_template(name, "share");
    let container = &mut pod["spec"]["containers"][0];
    container["image"] = "tessera/executables:e2e".into();
    container["command"] = command.into();
    pod
}
