//! Acting on a stage from outside: the counterpart of `e2e/cluster/node.sh`, with the same words.
//!
//! `tessera-simcluster serve` listens on a unix socket; `tessera-simcluster node ACTION NODE ...`
//! asks it.

use std::path::Path;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::Stage;

/// Programs that end by themselves are started again, as Kubernetes would: on a machine that is
/// busy enough a leader loses its lease without any fault.
const REVIVE_EVERY: std::time::Duration = std::time::Duration::from_millis(500);

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    ok: bool,
    text: String,
}

/// Answers one caller after the other. Runs until dropped.
pub(crate) async fn serve(listener: UnixListener, stage: &mut Stage) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(REVIVE_EVERY);
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted?.0,
            _ = ticks.tick() => {
                stage.revive()?;
                continue;
            }
        };
        if let Err(error) = converse(stream, stage).await {
            tracing::warn!(error = format!("{error:#}"), "a caller was not answered");
        }
    }
}

async fn converse(stream: UnixStream, stage: &mut Stage) -> anyhow::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let words: Vec<String> = serde_json::from_str(&line)?;
    let answer = match act(&words, stage).await {
        Ok(text) => Answer { ok: true, text },
        Err(error) => Answer { ok: false, text: format!("{error:#}") },
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    Ok(stream.get_mut().write_all(&text).await?)
}

/// Asks the stage behind `socket`; prints what it says.
pub(crate) async fn ask(socket: &Path, words: &[String]) -> anyhow::Result<()> {
    let stream = UnixStream::connect(socket).await;
    let mut stream = stream.with_context(|| format!("nobody serves at `{}`", socket.display()))?;
    let mut text = serde_json::to_vec(words)?;
    text.push(b'\n');
    stream.write_all(&text).await?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).await?;
    let answer: Answer =
        serde_json::from_str(&line).context("the stage ended before it answered")?;
    if !answer.ok {
        bail!(answer.text);
    }
    print!("{}", answer.text);
    Ok(())
}

async fn act(words: &[String], stage: &mut Stage) -> anyhow::Result<String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["restart", node, component] => {
            stop(stage, node, component, false).await?;
            start(stage, node, component).await?;
        }
        ["stop", node, component] => stop(stage, node, component, false).await?,
        ["kill", node, component] => stop(stage, node, component, true).await?,
        ["start", node, component] => start(stage, node, component).await?,
        ["policies", "control-plane", state @ ("on" | "off")] => {
            stage.switch_policies(state == "on")
        }
        ["residue", node] => return stage.machine(node)?.residue(),
        ["gpu", node, ..] => {
            let happening: Vec<String> = words[2..].iter().map(|word| (*word).to_owned()).collect();
            return stage.machine(node)?.gpu(&happening).await;
        }
        ["chaos", "begin", seed, seconds] => stage.begin_chaos(seed.parse()?, seconds.parse()?)?,
        ["chaos", "report"] => return stage.chaos_report(),
        ["chaos", "end"] => stage.end_chaos()?,
        ["clock", "control-plane", seconds] => {
            stage.set_clock("controller.clock", seconds.parse()?)?
        }
        ["clock", node, seconds] => {
            stage.set_clock(&format!("{node}/driver.clock"), seconds.parse()?)?
        }
        _ => bail!("not understood: {}", words.join(" ")),
    }
    Ok(String::new())
}

async fn stop(stage: &mut Stage, node: &str, component: &str, hard: bool) -> anyhow::Result<()> {
    match (node, component) {
        ("control-plane", "controller") if hard => stage.controller.kill().await,
        ("control-plane", "controller") => stage.controller.stop().await,
        (_, "driver") if hard => stage.machine(node)?.driver.kill().await,
        (_, "driver") => stage.machine(node)?.driver.stop().await,
        (_, "kubelet") => {
            stage.machine(node)?.stop_kubelet().await;
            Ok(())
        }
        _ => bail!("{node} has no {component} that can be stopped"),
    }
}

async fn start(stage: &mut Stage, node: &str, component: &str) -> anyhow::Result<()> {
    match (node, component) {
        ("control-plane", "controller") => stage.controller.start_again(),
        (_, "driver") => stage.machine(node)?.driver.start_again(),
        (_, "kubelet") => stage.machine(node)?.start_kubelet().await,
        _ => bail!("{node} has no {component} that can be started"),
    }
}
