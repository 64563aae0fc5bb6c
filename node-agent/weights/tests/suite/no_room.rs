//! A disk without room. The disk is a tmpfs of a few megabytes, which takes root to mount: where that cannot be, `make test` leaves
//! these tests out and says so.

use std::path::{Path, PathBuf};
use std::process::Command;

use prima_weights::{Download, DownloadError, LocalFile, Progress};
use tokio::sync::watch;

use crate::support::{Setup, download};

/// A disk of its own, for as long as this lives.
struct Disk(PathBuf);

impl Disk {
    fn mount(path: PathBuf, size: u64) -> Disk {
        std::fs::create_dir(&path).unwrap();
        let size = format!("size={size}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(&path)
            .status()
            .unwrap();
        assert!(
            mounted.success(),
            "cannot mount a tmpfs: this test takes root"
        );
        Disk(path)
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[tokio::test]
async fn a_share_that_does_not_fit_is_not_begun() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let disk = Disk::mount(setup.path("disk"), 2 << 20);
    let file = LocalFile::open(&disk.path().join("m.gguf"), remote.identity()).unwrap();
    setup.hub.clear();
    let error = download(&remote, &file, &setup.whole()).await.unwrap_err();
    let DownloadError::NoRoom {
        needed_bytes,
        available_bytes,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(*needed_bytes, setup.model.len() as u64);
    assert!(
        (1 << 20..2 << 20).contains(available_bytes),
        "{available_bytes}"
    );
    assert!(
        error
            .to_string()
            .contains(&format!("free {} bytes", needed_bytes - available_bytes)),
        "{error}"
    );
    assert_eq!(setup.hub.requests(), 0);

    // A share that fits does.
    let share = setup.share(0..1, false);
    download(&remote, &file, &share).await.unwrap();
    setup.assert_same(file.path(), &share);
}

#[tokio::test]
async fn files_that_do_not_fit_together_are_refused_before_the_first() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let size = setup.model.len() as u64;
    let disk = Disk::mount(setup.path("disk"), size * 3 / 2);
    let files = ["one.gguf", "two.gguf"]
        .map(|name| LocalFile::open(&disk.path().join(name), remote.identity()).unwrap());
    let whole = setup.whole();
    let downloads = files
        .each_ref()
        .map(|file| Download::new(&remote, file, &whole));
    let error = Download::check_room(&downloads).unwrap_err();
    assert!(
        matches!(error, DownloadError::NoRoom { needed_bytes, .. } if needed_bytes == 2 * size),
        "{error}"
    );

    // What is there takes no more.
    download(&remote, &files[0], &whole).await.unwrap();
    Download::check_room(&downloads[..1]).unwrap();
    let error = Download::check_room(&downloads).unwrap_err();
    assert!(
        matches!(error, DownloadError::NoRoom { needed_bytes, .. } if needed_bytes == size),
        "{error}"
    );
}

#[tokio::test]
async fn a_file_that_takes_its_whole_length_at_once_has_room() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let size = setup.model.len();
    let disk = Disk::mount(setup.path("disk"), size as u64 * 3 / 2);
    let file = LocalFile::open(&disk.path().join("m.gguf"), remote.identity()).unwrap();
    // As file systems without holes do.
    std::fs::write(file.path(), vec![0; size]).unwrap();
    download(&remote, &file, &setup.whole()).await.unwrap();
    setup.assert_same(file.path(), &setup.whole());
}

#[tokio::test]
async fn a_disk_that_fills_up_meanwhile_keeps_what_is_there() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let disk = Disk::mount(setup.path("disk"), 16 << 20);
    let file = LocalFile::open(&disk.path().join("m.gguf"), remote.identity()).unwrap();
    let whole = setup.whole();
    let (sender, mut receiver) = watch::channel(Progress::default());
    setup
        .hub
        .control(|control| control.bytes_per_second = Some(1 << 20));
    let running = Download::new(&remote, &file, &whole)
        .piece_bytes(64 << 10)
        .run(&sender);
    let filler = disk.path().join("filler");
    let filling = async {
        receiver
            .wait_for(|progress| progress.done_bytes > 1 << 20)
            .await
            .unwrap();
        let full = std::fs::write(&filler, vec![1; 16 << 20]).unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        setup.hub.control(|control| control.bytes_per_second = None);
    };
    let (failed, ()) = tokio::join!(running, filling);
    let error = failed.unwrap_err();
    assert!(matches!(error, DownloadError::DiskFull { .. }), "{error}");
    assert!(
        error.to_string().contains("free some room and go on"),
        "{error}"
    );

    std::fs::remove_file(filler).unwrap();
    // Other pieces' writes may be under way still: the next download waits for them, and so does one of nothing.
    download(&remote, &file, &[]).await.unwrap();
    let missing = prima_weights::tensors::total_bytes(&file.missing(&whole).unwrap());
    assert!(missing < setup.model.len() as u64, "nothing was kept");
    setup.hub.clear();
    download(&remote, &file, &whole).await.unwrap();
    assert_eq!(setup.hub.body_bytes(), missing);
    setup.assert_same(file.path(), &whole);
}
