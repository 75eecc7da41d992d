//! The tree, and the same by claim, as text.

use super::{Amount, GpuView, NodeView, Share, Tree};
use crate::devices::short;
use crate::output::{Table, count};

const TREE_HEADERS: [&str; 10] =
    ["NAME", "PRODUCT", "MEMORY", "TAKEN", "FREE", "CORES", "TAKEN", "FREE", "PODS", "STATE"];

const CLAIM_HEADERS: [&str; 8] =
    ["NAMESPACE", "CLAIM", "PODS", "NODE", "GPU", "MEMORY", "CORES", "STATE"];

/// Nodes, below each its GPUs, below each its shares.
pub fn tree(tree: &Tree, headers: bool) -> String {
    if tree.nodes.is_empty() {
        return "No GPUs found.\n".to_owned();
    }
    let mut table = Table::new(headers.then_some(&TREE_HEADERS[..]));
    for node in &tree.nodes {
        table.row(node_row(node));
        for (g, gpu) in node.gpus.iter().enumerate() {
            let is_last = g + 1 == node.gpus.len();
            table.row(gpu_row(gpu, if is_last { "└─" } else { "├─" }));
            for (s, share) in gpu.shares.iter().enumerate() {
                let line = if is_last { "   " } else { "│  " };
                let branch = if s + 1 == gpu.shares.len() { "└─" } else { "├─" };
                table.row(share_row(share, &format!("{line}{branch}")));
            }
        }
    }
    let mut text = table.render();
    if headers {
        text.push('\n');
        text.push_str(&sum(tree));
    }
    text
}

/// One line for each share.
pub fn claims(tree: &Tree, headers: bool) -> String {
    let mut shares: Vec<(&Share, &NodeView, &GpuView)> = Vec::new();
    for node in &tree.nodes {
        for gpu in &node.gpus {
            shares.extend(gpu.shares.iter().map(|share| (share, node, gpu)));
        }
    }
    if shares.is_empty() {
        return "No claims hold GPUs.\n".to_owned();
    }
    shares.sort_by_key(|(share, node, gpu)| {
        (&share.namespace, &share.claim, &node.name, &gpu.device)
    });
    let mut table = Table::new(headers.then_some(&CLAIM_HEADERS[..]));
    for (share, node, gpu) in shares {
        table.row(vec![
            share.namespace.clone(),
            share.claim.clone(),
            pods(share),
            node.name.clone(),
            short(&gpu.device).to_owned(),
            share.memory.to_string(),
            share.cores.to_string(),
            share_state(share),
        ]);
    }
    table.render()
}

fn node_row(node: &NodeView) -> Vec<String> {
    let mut row = vec![node.name.clone(), count(node.gpus.len(), "GPU")];
    row.extend(amount(node.memory));
    row.extend(amount(node.cores));
    row.extend([String::new(), node.state.join(",")]);
    row
}

fn gpu_row(gpu: &GpuView, branch: &str) -> Vec<String> {
    let index = gpu.index.map(|index| format!("{index} ")).unwrap_or_default();
    let mut row = vec![
        format!("{branch} {index}{}", short(&gpu.device)),
        gpu.product.clone().unwrap_or_default(),
    ];
    row.extend(amount(gpu.memory));
    row.extend(amount(gpu.cores));
    let state: Vec<&str> = gpu.state.iter().chain(&gpu.taints).map(String::as_str).collect();
    row.extend([String::new(), state.join(",")]);
    row
}

fn share_row(share: &Share, branch: &str) -> Vec<String> {
    let none = String::new;
    vec![
        format!("{branch} {}/{}", share.namespace, share.claim),
        none(),
        none(),
        share.memory.to_string(),
        none(),
        none(),
        share.cores.to_string(),
        none(),
        pods(share),
        share_state(share),
    ]
}

fn amount(amount: Amount) -> [String; 3] {
    [amount.total, amount.taken, amount.free].map(|amount| amount.to_string())
}

fn pods(share: &Share) -> String {
    if share.pods.is_empty() { "<none>".to_owned() } else { share.pods.join(",") }
}

fn share_state(share: &Share) -> String {
    let all = [("Whole", share.whole), ("Admin", share.admin), ("ClaimGone", share.claim_gone)];
    let states = all.into_iter().filter(|(_, is_so)| *is_so).map(|(name, _)| name);
    states.chain(share.sharing).collect::<Vec<_>>().join(",")
}

fn sum(tree: &Tree) -> String {
    let gpus = || tree.nodes.iter().flat_map(|node| &node.gpus);
    let untouched =
        gpus().filter(|gpu| gpu.memory.taken.is_zero() && gpu.cores.taken.is_zero()).count();
    let shares: usize = gpus().map(|gpu| gpu.shares.len()).sum();
    let mut memory = Amount::default();
    tree.nodes.iter().for_each(|node| memory.add(node.memory));
    format!(
        "{}, {} ({untouched} untouched), {}; {} of {} memory free\n",
        count(tree.nodes.len(), "node"),
        count(gpus().count(), "GPU"),
        count(shares, "share"),
        memory.free,
        memory.total
    )
}
