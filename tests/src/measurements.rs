//! What agents measured of this machine. That takes each of them ten seconds of all processors, and is the same every time: of those that are
//! started alike only the first measures. Later ones find what it found, as an agent does that starts again.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::inputs;

/// Those of agents that are started alike: with as many threads, on this machine or on a node of a cluster.
pub struct Measurements {
    /// Beside the programs. Void when the agent was built again.
    kept: PathBuf,
}

impl Measurements {
    pub fn of(started: &str) -> Measurements {
        let agent = inputs::program("prima-node-agent");
        let kept = agent.with_file_name(format!("measured-{started}.json"));
        let built = |path: &Path| path.metadata().and_then(|file| file.modified()).ok();
        if built(&kept) < built(&agent) {
            // Another test may have removed it.
            let _ = fs::remove_file(&kept);
        }
        Measurements { kept }
    }

    /// Puts them where an agent looks for its own: in `file`, for an agent that has its models in the folder `data`, as it sees it. Does nothing
    /// while there are none.
    pub fn give(&self, file: &Path, data: &Path) {
        if let Ok(mut entry) = read(&self.kept) {
            entry["key"]["models"] = Value::from(data.to_str().expect("a path of Unicode"));
            write(file, &entry).expect("an agent's measurements");
        }
    }

    /// Keeps what an agent measured, from there, unless that is what it was given.
    pub fn keep(&self, file: &Path) {
        let mut entry = read(file).expect("an agent's measurements");
        let time = |entry: &Value| entry["status"]["measuredAt"].clone();
        if read(&self.kept).is_ok_and(|kept| time(&kept) == time(&entry)) {
            return;
        }
        // Agents do not trust for long what was measured beside other programs, which tests always are.
        entry["others_percent"] = Value::from(0);
        write(&self.kept, &entry).expect("measurements for later agents");
    }
}

/// Changes what an agent measured.
pub(crate) fn change(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut entry = read(file).expect("an agent's measurements");
    change(&mut entry);
    write(file, &entry).expect("an agent's measurements");
}

fn read(file: &Path) -> io::Result<Value> {
    let text = fs::read(file)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Whole or not at all, as tests run side by side.
fn write(file: &Path, entry: &Value) -> io::Result<()> {
    let folder = file.parent().expect("a folder");
    fs::create_dir_all(folder)?;
    let new = tempfile::NamedTempFile::new_in(folder)?;
    // Agents in pods are another user.
    new.as_file()
        .set_permissions(Permissions::from_mode(0o644))?;
    fs::write(&new, entry.to_string())?;
    new.persist(file)?;
    Ok(())
}
