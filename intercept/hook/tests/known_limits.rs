//! Known limitations of the preload library. If a test fails, the limitation no longer exists and
//! the documentation is out of date.

mod container;

use container::{GIB, Node, set_up};
use tessera_intercept_abi::{GRANTS_TMPFS_INODES, LEDGER_TMPFS_INODES};
use tessera_test_support::test_name;

#[test]
fn tenant_with_mount_permission_can_forge_a_grant() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (real, forged) = (node.share("claim-0", 0, GIB), node.share("forged", 0, 8 * GIB));
    let [grant, ledger] = forged.paths().each_ref().map(|path| path.display());
    // The tenant copies each file to a tmpfs like the driver's.
    let script = format!(
        "unshare --user --map-root-user --mount sh -euc 'd=/dev/tessera/forged; mkdir $d; touch $d/grant $d/ledger; \
         mkdir /dev/g /dev/l; mount -t tmpfs -o nr_inodes={GRANTS_TMPFS_INODES} tmpfs /dev/g; cp {grant} /dev/g/; \
         mount -t tmpfs -o nr_inodes={LEDGER_TMPFS_INODES} tmpfs /dev/l; cp {ledger} /dev/l/; \
         mount --bind /dev/g/grant $d/grant; mount -o remount,bind,ro $d/grant; mount --bind /dev/l/ledger $d/ledger; \
         exec {} fill'",
        container::probe().display()
    );
    let lines = container::lines_of(&node.container(&[&real]).run("sh", &["-c", &script]));
    assert_eq!(lines[1]["takenBytes"], 9 * GIB);
}

#[test]
fn plugin_with_deepbind_finds_the_real_driver() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let plugin = node.plugin("plugin");
    let container = node.container(&[&node.share("claim-0", 0, GIB)]);
    let lines = container.run_c("deepbind", false, &[plugin.to_str().expect("text")]);
    assert_eq!(lines[0]["result"], 0);
}
