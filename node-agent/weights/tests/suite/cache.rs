//! The cache removes files by age, and never one in use.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use prima_weights::{Cache, Download, FileIdentity, LocalFile, Progress, Room, Source};
use tokio::sync::watch;

use crate::support::{Setup, hub_source};

const HELD: &str = "PRIMA_TEST_HELD";
const SIZE: u64 = 64 << 20;

fn identity(etag: &str) -> FileIdentity {
    FileIdentity {
        size_bytes: SIZE,
        etag: Some(etag.to_owned()),
        sha256: None,
        revision_commit: None,
    }
}

fn source(name: &str) -> Source {
    hub_source(
        "https://hub",
        "owner/models",
        "main",
        &format!("{name}.gguf"),
    )
}

/// A file of the cache with a megabyte in it, last used `age` hours ago.
fn entry(cache: &Cache, name: &str, age: u64) -> PathBuf {
    let file = cache
        .files(&source(name), &[identity("1")])
        .unwrap()
        .remove(0);
    let path = file.path().to_owned();
    drop(file);
    let data = File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&data, &vec![1; 1 << 20], 5 << 20).unwrap();
    used(&path, age);
    path
}

fn used(path: &Path, age: u64) {
    let time = SystemTime::now() - Duration::from_secs(age * 3600);
    for path in [path.to_owned(), path.with_extension("ledger")]
        .iter()
        .filter(|path| path.exists())
    {
        File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_modified(time)
            .unwrap();
    }
}

#[test]
fn files_have_names_for_people_and_versions() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let names = |source: &Source, files: &[FileIdentity]| -> Vec<String> {
        let paths = cache.paths(source, files).into_iter();
        let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        paths.map(name).collect()
    };
    let path = |source: &Source, identity: &FileIdentity| {
        names(source, std::slice::from_ref(identity)).remove(0)
    };
    let one = path(&source("Llama 3.2/../x"), &identity("1"));
    assert!(
        one.starts_with("x-") && one.ends_with(".gguf") && one.len() == 2 + 16 + 5,
        "{one}"
    );
    let different: HashSet<String> = [
        path(&source("m"), &identity("1")),
        path(&source("m"), &identity("2")),
        path(&source("n"), &identity("1")),
        path(
            &hub_source("https://other", "owner/models", "main", "m.gguf"),
            &identity("1"),
        ),
    ]
    .into();
    assert_eq!(different.len(), 4);
    // Another commit with the same file is the same file.
    let commit = hub_source("https://hub", "owner/models", "abc", "m.gguf");
    assert_eq!(
        path(&commit, &identity("1")),
        path(&source("m"), &identity("1"))
    );
    // The parts of a model keep their numbers, so that who opens the first finds the others.
    let parts = |etags: [&str; 2]| names(&source("m-00001-of-00002"), &etags.map(identity));
    let two = parts(["1", "2"]);
    let (stem, first) = two[0].split_at("m-0123456789abcdef".len());
    assert_eq!(first, "-00001-of-00002.gguf");
    assert_eq!(two[1], format!("{stem}-00002-of-00002.gguf"));
    assert_ne!(parts(["1", "3"])[0], two[0]);
}

#[test]
fn the_oldest_go_first_until_the_rest_fits() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(&folder.path().join("models")).unwrap();
    let (newest, oldest, middle) = (
        entry(&cache, "newest", 1),
        entry(&cache, "oldest", 3),
        entry(&cache, "middle", 2),
    );
    let foreign = folder.path().join("models/notes.gguf");
    fs::write(&foreign, vec![1; 1 << 20]).unwrap();
    let entries = cache.entries().unwrap();
    assert_eq!(
        entries.iter().map(|entry| &entry.path).collect::<Vec<_>>(),
        [&oldest, &middle, &newest]
    );
    let each = entries[0].allocated_bytes;
    assert!(
        (1 << 20..2 << 20).contains(&each),
        "{each} bytes on the disk of a file of {SIZE}"
    );

    let nothing = cache.collect(10 * each).unwrap();
    assert_eq!((nothing.removed.len(), nothing.freed_bytes), (0, 0));
    let collected = cache.collect(2 * each).unwrap();
    assert_eq!(
        (collected.removed, collected.freed_bytes),
        (vec![oldest.clone()], each)
    );
    assert!(!oldest.exists() && !oldest.with_extension("ledger").exists());
    let collected = cache.collect(each).unwrap();
    assert_eq!(collected.removed, [middle]);
    assert_eq!(collected.remaining_bytes, each);
    assert!(newest.exists() && foreign.exists());
}

#[test]
fn nothing_goes_for_what_does_not_fit_even_so() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let (in_use, older, newer) = (
        entry(&cache, "in-use", 3),
        entry(&cache, "older", 2),
        entry(&cache, "newer", 1),
    );
    let each = cache.entries().unwrap()[0].allocated_bytes;
    let held = cache.files(&source("in-use"), &[identity("1")]).unwrap();
    let new = cache.files(&source("new"), &[identity("1")]).unwrap();
    let new = new.into_iter().next().unwrap();
    let entries = cache.entries().unwrap();
    let own = entries.iter().find(|entry| entry.path == new.path());
    // Its ledger.
    let own = own.unwrap().allocated_bytes;
    let make_room = |budget_bytes, more_bytes| {
        let to_fetch = [(new.clone(), more_bytes)];
        cache.make_room(own + budget_bytes, &to_fetch).unwrap()
    };
    // The last is less than is in use already.
    for (budget_bytes, more_bytes, lacking_bytes) in [
        (3 * each, 2 * each + 1, 1),
        (3 * each, 9 * each, 7 * each),
        (each - 5, 0, 5),
    ] {
        let room = make_room(budget_bytes, more_bytes);
        let short = Room::Short {
            lacking_bytes,
            others_bytes: each,
        };
        assert_eq!(room, short);
    }
    assert!(in_use.exists() && older.exists() && newer.exists());

    let removed = |budget_bytes, more_bytes| match make_room(budget_bytes, more_bytes) {
        Room::Made { collected, .. } => collected.removed,
        other => panic!("{other:?}"),
    };
    assert_eq!(removed(4 * each, each), [] as [PathBuf; 0]);
    assert_eq!(removed(3 * each, each), [older]);
    assert_eq!(removed(3 * each, 2 * each), [newer]);
    drop(held);
    assert_eq!(removed(each, each), [in_use]);
}

#[test]
fn room_that_is_being_filled_is_given_to_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let new = |name| {
        let files = cache.files(&source(name), &[identity("1")]);
        files.unwrap().into_iter().next().unwrap()
    };
    let (first, second) = (new("first"), new("second"));
    let entries = cache.entries().unwrap();
    // Their ledgers.
    let ledgers: u64 = entries.iter().map(|entry| entry.allocated_bytes).sum();
    let make_room = |file: &LocalFile| {
        let to_fetch = [(file.clone(), 1 << 20)];
        cache.make_room(ledgers + (3 << 19), &to_fetch).unwrap()
    };
    let Room::Made { kept, .. } = make_room(&first) else {
        panic!("there is room for one");
    };
    let is_short = || {
        matches!(make_room(&second), Room::Short { lacking_bytes, others_bytes }
            if lacking_bytes == 1 << 19 && others_bytes >= 1 << 20)
    };
    assert!(is_short());
    let writer = first.writer().unwrap().unwrap();
    writer.write(0, &vec![1; 1 << 18]).unwrap();
    assert!(is_short(), "some of it is there");
    // Whose room it is may look again.
    assert!(matches!(make_room(&first), Room::Made { .. }));
    drop(kept);
    assert!(matches!(make_room(&second), Room::Made { .. }));
}

#[test]
fn files_without_content_are_given_back_unless_others_use_them() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let open = |name| {
        let files = cache.files(&source(name), &[identity("1")]);
        files.unwrap().into_iter().next().unwrap()
    };
    let (empty, used, begun) = (open("empty"), open("used"), open("begun"));
    let paths = [&empty, &used, &begun].map(|file| file.path().to_owned());
    let _other = open("used");
    let writer = begun.writer().unwrap().unwrap();
    writer.write(0, &[1; 100]).unwrap();
    drop(writer);
    cache.give_back_empty(vec![empty, used, begun]).unwrap();
    assert_eq!(paths.map(|path| path.exists()), [false, true, true]);
}

#[test]
fn what_is_left_of_broken_downloads_counts_and_goes() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let data_only = entry(&cache, "data", 3);
    fs::remove_file(data_only.with_extension("ledger")).unwrap();
    let ledger_only = entry(&cache, "ledger", 2);
    fs::remove_file(&ledger_only).unwrap();
    fs::write(ledger_only.with_extension("ledger.new"), vec![1; 100_000]).unwrap();
    let entries = cache.entries().unwrap();
    assert_eq!(entries.len(), 2);
    assert!(
        entries[0].allocated_bytes >= 1 << 20 && entries[1].allocated_bytes >= 100_000,
        "{entries:?}"
    );
    let collected = cache.collect(0).unwrap();
    assert_eq!((collected.removed.len(), collected.remaining_bytes), (2, 0));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// Holds a file open until its input ends.
#[test]
#[ignore = "started by the test below"]
fn holder() {
    let path = PathBuf::from(std::env::var(HELD).expect("started by the test below"));
    let _file = LocalFile::open(&path, &identity("1")).unwrap();
    println!("\nheld");
    std::io::stdin().lines().for_each(drop);
}

#[test]
fn nothing_goes_that_any_process_has_open() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let (other, here, free) = (
        entry(&cache, "other", 3),
        entry(&cache, "here", 2),
        entry(&cache, "free", 1),
    );
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cache::holder", "--ignored", "--nocapture"])
        .env(HELD, &other)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "held"));
    let held = cache.files(&source("here"), &[identity("1")]).unwrap();
    let clone = held.clone();
    drop(held);
    used(&other, 30);
    used(&here, 20);

    let collected = cache.collect(0).unwrap();
    assert_eq!(collected.removed, [free]);
    assert!(collected.remaining_bytes >= 2 << 20);
    assert!(other.exists() && here.exists());

    drop(clone);
    // The end of its use is its last use.
    let last_used = cache
        .entries()
        .unwrap()
        .into_iter()
        .find(|entry| entry.path == here)
        .unwrap()
        .last_used;
    assert!(last_used.elapsed().unwrap() < Duration::from_secs(3600));
    assert_eq!(cache.collect(0).unwrap().removed, [here]);
    drop(child.stdin.take());
    lines.for_each(drop);
    child.wait().unwrap();
    assert_eq!(cache.collect(0).unwrap().removed, [other]);
}

/// Collects all the time while a download runs: the file stays until nobody has it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_under_way_is_never_collected() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let cache = Cache::open(&setup.path("models")).unwrap();
    let file = cache
        .files(&setup.source(), std::slice::from_ref(remote.identity()))
        .unwrap()
        .remove(0);
    let collector = cache.clone();
    let (stop, stopped) = watch::channel(false);
    let (round, mut rounds) = watch::channel(0);
    let collecting = std::thread::spawn(move || {
        while !*stopped.borrow() {
            assert_eq!(collector.collect(0).unwrap().removed, [] as [PathBuf; 0]);
            round.send_modify(|round| *round += 1);
        }
    });
    // Slowly, until it has been collected often enough.
    setup
        .hub
        .control(|control| control.bytes_per_second = Some(64 << 10));
    let (sender, _receiver) = watch::channel(Progress::default());
    let whole = setup.whole();
    let download = Download::new(&remote, &file, &whole).piece_bytes(64 << 10);
    let collected = async {
        rounds.wait_for(|rounds| *rounds > 10).await.unwrap();
        setup.hub.control(|control| control.bytes_per_second = None);
        std::future::pending::<std::convert::Infallible>().await
    };
    tokio::select! {
        downloaded = download.run(&sender) => downloaded.unwrap(),
        never = collected => match never {},
    }
    stop.send(true).unwrap();
    collecting.join().unwrap();
    assert!(*rounds.borrow() > 10);
    setup.assert_same(file.path(), &setup.whole());
    let path = file.path().to_owned();
    drop(file);
    assert_eq!(cache.collect(0).unwrap().removed, [path]);
}
