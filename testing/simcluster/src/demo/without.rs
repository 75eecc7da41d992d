//! The demo where namespaces are not allowed: the driver's view of the GPUs, and a probe that
//! nobody limits.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::Context as _;
use serde_json::Value;
use tempfile::TempDir;

use super::screen::Screen;
use super::tables;
use crate::serve::NODE_WORLD;
use crate::testbed::programs::Programs;

/// Shows what can be shown. No container can be made, so nothing is limited, and it says so.
pub(crate) fn run(
    screen: &Screen,
    worlds: &Path,
    reason: &std::io::Error,
) -> anyhow::Result<ExitCode> {
    screen.title("Tessera: one GPU, many pods, each held to its share");
    screen.say(&format!("This machine allows no user namespaces ({reason})."));
    screen.say(
        "Without them no container can be made, and shares are enforced in containers only. What is left:",
    );
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
    published(screen, &programs, &root, &directory.path().join("sys"))?;
    probed(screen, &programs, &root)?;
    screen.gap();
    screen.say(
        "For the rest, allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or, on Ubuntu,",
    );
    screen.say("kernel.apparmor_restrict_unprivileged_userns=0), or run the demo as root.");
    Ok(ExitCode::SUCCESS)
}

fn published(
    screen: &Screen,
    programs: &Programs,
    root: &Path,
    sysfs: &Path,
) -> anyhow::Result<()> {
    screen.step("What tessera-driver finds through NVML, as it would publish it");
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
        .context("the driver printed no slices")?;
    screen.table(&tables::GPU_COLUMNS, &tables::gpus(&slices));
    Ok(())
}

fn probed(screen: &Screen, programs: &Programs, root: &Path) -> anyhow::Result<()> {
    screen.step("What a program sees on the first GPU with nobody between");
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let said = output(
        Command::new(&programs.probe)
            .arg("fill")
            .arg("--cuda")
            .arg(libraries.join("libcuda.so.1"))
            .arg("--nvml")
            .arg(libraries.join("libnvidia-ml.so.1")),
    )?;
    let lines: Vec<Value> =
        said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let find = |event: &str| lines.iter().find(|line| line["event"] == event);
    let (see, filled) = find("see").zip(find("filled")).context("the probe said nothing")?;
    let device = &see["devices"][0];
    screen.good(&format!(
        "{}: {}",
        device["name"].as_str().unwrap_or_default(),
        tables::gib(&device["cudaTotalBytes"])
    ));
    screen.good(&format!("it took {}: all of it", tables::gib(&filled["takenBytes"])));
    Ok(())
}

fn output(command: &mut Command) -> anyhow::Result<String> {
    let name = command.get_program().display().to_string();
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("failed to run `{name}`"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "`{name}`: {}", said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
