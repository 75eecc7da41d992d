//! Killing components at random moments, one after the other, and starting each again.

use std::time::Duration;

use crate::operations::Operations;
use crate::random::Random;

/// Who is killed.
type Victim = (String, &'static str);

/// Kills until it is dropped; ends only with an error.
pub(super) struct Harm<'a> {
    hands: &'a Operations,
    victims: Vec<Victim>,
    random: Random,
    /// Longest pause between two kills.
    pause: Duration,
    /// Who is down now.
    down: Option<Victim>,
    pub(super) kills: usize,
}

impl<'a> Harm<'a> {
    pub(super) fn new(hands: &'a Operations, nodes: &[String], random: Random, pause: Duration) -> Self {
        let on_nodes =
            nodes.iter().flat_map(|node| ["driver", "kubelet"].map(|component| (node.clone(), component)));
        let victims = on_nodes.chain([("control-plane".to_owned(), "controller")]).collect();
        Self { hands, victims, random, pause, down: None, kills: 0 }
    }

    pub(super) async fn go_on(&mut self) -> anyhow::Result<std::convert::Infallible> {
        loop {
            self.wait(self.pause).await;
            let victim = self.random.one_of(&self.victims).clone();
            self.down = Some(victim.clone());
            self.hands.run(&["kill", &victim.0, victim.1]).await?;
            self.kills += 1;
            self.wait(Duration::from_secs(2)).await;
            self.repair().await?;
        }
    }

    /// Starts again what is down.
    pub(super) async fn repair(&mut self) -> anyhow::Result<()> {
        if let Some((node, component)) = self.down.clone() {
            self.hands.run(&["start", &node, component]).await?;
            self.down = None;
        }
        Ok(())
    }

    /// The pauses are the input of the trial; nothing is waited for with them.
    async fn wait(&mut self, longest: Duration) {
        let longest = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX);
        tokio::time::sleep(Duration::from_millis(self.random.between(0, longest))).await;
    }
}
