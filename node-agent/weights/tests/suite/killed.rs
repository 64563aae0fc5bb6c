//! Downloads killed at any moment go on where they were, with the right bytes and few of them twice.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use prima_weights::tensors::total_bytes;
use prima_weights::{Client, LocalFile, Reach, Remote};

use crate::support::{FILE, REPO, Random, Setup, download, hub_source, quick};

const ENDPOINT: &str = "PRIMA_TEST_ENDPOINT";
const TARGET: &str = "PRIMA_TEST_FILE";
const KILLS: u64 = 12;
/// What one process is sent at most before it is killed. It is no time: a slow machine takes long to start a process.
const BETWEEN_KILLS: u64 = 1 << 20;
/// What a kill costs at most: one piece of 64 KiB for each of four connections, and the first bytes of the file.
const LOST_BYTES: u64 = 4 * (64 << 10) + 4;

/// The process that the test below kills; by itself it has nothing to fetch.
#[tokio::test]
#[ignore = "started by the test that kills it"]
async fn child() {
    let endpoint = std::env::var(ENDPOINT).expect("started by the test that kills it");
    let path = PathBuf::from(std::env::var(TARGET).expect("started by the test that kills it"));
    let client = Client::new(quick(), Reach::anywhere()).unwrap();
    let source = hub_source(&endpoint, REPO, "main", FILE);
    let remote = Remote::open(&client, &source).await.unwrap();
    let file = LocalFile::open(&path, remote.identity()).unwrap();
    let whole = 0..remote.identity().size_bytes;
    download(&remote, &file, &[whole]).await.unwrap();
}

fn start(setup: &Setup, path: &std::path::Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed::child", "--ignored"])
        .env(ENDPOINT, setup.hub.endpoint())
        .env(TARGET, path)
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_download_goes_on_where_it_was() {
    let setup = Setup::new().await;
    setup
        .hub
        .control(|control| control.bytes_per_second = Some(1 << 20));
    let whole = setup.whole();
    for seed in 1..=4 {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ seed);
        let path = setup.path(&format!("killed-{seed}.gguf"));
        setup.hub.clear();
        let mut kills = 0;
        let mut left = vec![total_bytes(&whole)];
        for _ in 0..KILLS {
            let enough = setup.hub.body_bytes() + random.below(BETWEEN_KILLS);
            let mut child = start(&setup, &path);
            let mut ended = false;
            while !ended && setup.hub.body_bytes() < enough {
                tokio::time::sleep(Duration::from_millis(1)).await;
                ended = child.try_wait().unwrap().is_some();
            }
            if ended {
                break;
            }
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
            if path.with_extension("ledger").exists() {
                let identity = setup.open().await.identity().clone();
                let file = LocalFile::open(&path, &identity).unwrap();
                let missing = file.missing(&whole).unwrap();
                let missing_bytes = total_bytes(&missing);
                assert!(
                    Some(&missing_bytes) <= left.last(),
                    "seed {seed}: what was there is not there any more"
                );
                left.push(missing_bytes);
                // What the ledger says is there is right already.
                let content = std::fs::read(&path).unwrap();
                let mut hole = missing.iter().cloned().flatten().peekable();
                let right = (0..content.len()).all(|at| match hole.next_if_eq(&(at as u64)) {
                    Some(_) => true,
                    None => content[at] == setup.model[at],
                });
                assert!(right, "seed {seed}: the ledger vouches for wrong bytes");
            }
        }
        assert!(start(&setup, &path).wait().unwrap().success());
        setup.assert_same(&path, &whole);
        left.dedup();
        assert!(
            kills >= 3 && left.len() >= 3,
            "seed {seed}: {kills} kills, {left:?}: none of them between"
        );
        let size = setup.model.len() as u64;
        let sent = setup.hub.body_bytes();
        let most = size + (kills + 1) * LOST_BYTES + 4 * KILLS;
        assert!(
            (size..=most).contains(&sent),
            "seed {seed}: {sent} bytes sent of {size}, at most {most}"
        );
    }
}
