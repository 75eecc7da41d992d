//! What the preload library does not hold, each shown so that nobody believes otherwise. A test
//! that fails here is good news: then the documentation is out of date.

mod container;

use container::{GIB, Node, can_contain};
use tessera_intercept_abi::{GRANTS_TMPFS_INODES, LEDGER_TMPFS_INODES};

#[test]
fn a_tenant_who_may_mount_can_forge_a_grant() {
    if !can_contain("a_tenant_who_may_mount_can_forge_a_grant") {
        return;
    }
    let node = Node::new();
    let (real, forged) = (node.share("claim-0", 0, GIB), node.share("forged", 0, 8 * GIB));
    let [grant, ledger] = forged.paths().each_ref().map(|path| path.display());
    // It takes a copy of each file on a tmpfs made like the driver's.
    let script = format!(
        "unshare --user --map-root-user --mount sh -euc 'd=/dev/tessera/forged; mkdir $d; touch $d/grant $d/ledger; \
         mkdir /dev/g /dev/l; mount -t tmpfs -o nr_inodes={GRANTS_TMPFS_INODES} tmpfs /dev/g; cp {grant} /dev/g/; \
         mount -t tmpfs -o nr_inodes={LEDGER_TMPFS_INODES} tmpfs /dev/l; cp {ledger} /dev/l/; \
         mount --bind /dev/g/grant $d/grant; mount -o remount,bind,ro $d/grant; mount --bind /dev/l/ledger $d/ledger; \
         exec {} fill'",
        container::probe().display()
    );
    let lines = container::lines_of(&node.contain(&[&real]).run("sh", &["-c", &script]));
    assert_eq!(lines[1]["takenBytes"], 9 * GIB);
}

#[test]
fn a_plugin_that_binds_deeply_finds_the_driver_itself() {
    if !can_contain("a_plugin_that_binds_deeply_finds_the_driver_itself") {
        return;
    }
    let node = Node::new();
    let plugin = node.plugin("plugin");
    let container = node.contain(&[&node.share("claim-0", 0, GIB)]);
    let lines = container.run_c("deepbind", false, &[plugin.to_str().expect("text")]);
    assert_eq!(lines[0]["result"], 0);
}
