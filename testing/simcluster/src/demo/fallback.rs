//! The demo without namespaces: the driver's view of the GPUs, and a probe without limits.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::Context as _;
use serde_json::Value;
use tempfile::TempDir;

use super::screen::Screen;
use super::{steps, tables};
use crate::serve::NODE_WORLD;
use crate::testbed::programs::Programs;

/// Runs the steps that need no container. Nothing is limited, and the output says so.
pub(crate) fn run(
    screen: &Screen,
    worlds: &Path,
    reason: &std::io::Error,
) -> anyhow::Result<ExitCode> {
    screen.title(steps::TITLE);
    screen.say(&format!("This machine allows no user namespaces ({reason})."));
    screen.say("Without them no container can be created, and limits apply only in containers.");
    screen.say("The remaining steps:");
    let programs = Programs::beside_this()?;
    let directory = TempDir::with_prefix("tsim-")?;
    let root = directory.path().join("driver-root");
    let world = worlds.join(format!("{NODE_WORLD}.yaml"));
    let files = [&world, &programs.fake_nvml, &programs.fake_cuda, &root];
    output(Command::new(&programs.fake_world).arg("driver-root").args(files))?;
    output(
        Command::new(&programs.fake_world)
            .arg("sysfs")
            .arg(&world)
            .arg(directory.path().join("sys")),
    )?;
    show_published_gpus(screen, &programs, &root, &directory.path().join("sys"))?;
    show_unlimited_probe(screen, &programs, &root)?;
    screen.gap();
    screen.say("To see the whole demo, allow user namespaces or run it as root:");
    screen.commands(&[
        ("sysctl kernel.unprivileged_userns_clone=1", "Debian"),
        ("sysctl kernel.apparmor_restrict_unprivileged_userns=0", "Ubuntu"),
    ]);
    Ok(ExitCode::SUCCESS)
}

fn show_published_gpus(
    screen: &Screen,
    programs: &Programs,
    root: &Path,
    sysfs: &Path,
) -> anyhow::Result<()> {
    screen.step("GPUs that tessera-driver finds through NVML and would publish");
    let slices = output(
        Command::new(&programs.driver)
            .args(["--node-name", "node-a", "--print-slices", "--driver-root"])
            .arg(root)
            .arg("--sysfs-root")
            .arg(sysfs),
    )?;
    let slices: Vec<_> = slices
        .split("\n---\n")
        .filter(|text| !text.trim().is_empty())
        .map(serde_saphyr::from_str)
        .collect::<Result<_, _>>()
        .context("invalid ResourceSlices from tessera-driver")?;
    for node in tables::nodes(&slices) {
        screen.good(&node);
    }
    Ok(())
}

fn show_unlimited_probe(screen: &Screen, programs: &Programs, root: &Path) -> anyhow::Result<()> {
    screen.step("View of a program on the first GPU, without a container and without limits");
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let text = output(
        Command::new(&programs.probe)
            .arg("fill")
            .arg("--cuda")
            .arg(libraries.join("libcuda.so.1"))
            .arg("--nvml")
            .arg(libraries.join("libnvidia-ml.so.1")),
    )?;
    let lines: Vec<Value> =
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let find = |event: &str| lines.iter().find(|line| line["event"] == event);
    let (see, filled) =
        find("see").zip(find("filled")).context("incomplete output of tessera-probe")?;
    let device = &see["devices"][0];
    screen.good(&format!(
        "{}: {}",
        device["name"].as_str().unwrap_or_default(),
        tables::gib(&device["cudaTotalBytes"])
    ));
    screen.good(&format!("{} allocated: all of it", tables::gib(&filled["takenBytes"])));
    Ok(())
}

fn output(command: &mut Command) -> anyhow::Result<String> {
    let name = command.get_program().display().to_string();
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot run `{name}`"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "`{name}`: {}", stderr.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
