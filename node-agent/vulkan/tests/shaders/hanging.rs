//! A GPU that hangs, as it seems to whoever has no patience. Each test opens it anew, since nobody uses it afterwards.

use std::time::Duration;

use prima_vulkan::{Device, VulkanError};

use crate::support::open;

/// A device, and the same without patience.
fn devices() -> (Device, Device) {
    let device = open();
    (device.clone(), device.with_patience(Duration::ZERO))
}

#[track_caller]
fn assert_hung<T>(result: Result<T, VulkanError>) {
    let error = result.err();
    assert!(
        matches!(error, Some(VulkanError::Hung { seconds: 0 })),
        "{error:?}"
    );
}

/// That nothing is asked of it any more, by none who has it open.
#[track_caller]
fn assert_given_up(device: &Device) {
    assert_hung(device.pass());
    assert_hung(device.buffer(4));
    assert_hung(device.uploads());
}

#[test]
fn a_pass_that_takes_too_long_is_the_last() {
    let (device, impatient) = devices();
    let buffer = device.buffer(1024).unwrap();
    device.upload(buffer.whole(), &[7_u32; 256]).unwrap();
    let mut pass = impatient.pass().unwrap();
    pass.write(buffer.whole(), &[8_u32; 256]).unwrap();
    // Of several parts, too.
    pass.go_on().unwrap();
    pass.write(buffer.whole(), &[9_u32; 256]).unwrap();
    assert_hung(pass.finish());
    assert_given_up(&device);
    assert_given_up(&impatient);
}

#[test]
fn a_part_that_is_waited_for_in_vain_is_the_last() {
    let (device, impatient) = devices();
    let buffer = device.buffer(1024).unwrap();
    let mut pass = impatient.pass().unwrap();
    pass.write(buffer.whole(), &[8_u32; 256]).unwrap();
    pass.mark(1).unwrap();
    // Nothing was handed over for this one.
    pass.wait(0).unwrap();
    assert_hung(pass.wait(1));
    drop(pass);
    assert_given_up(&device);
}

/// It was handed to the GPU in part, so what it uses must not go before.
#[test]
fn a_pass_that_is_dropped_waits_no_longer_than_others() {
    let (device, impatient) = devices();
    let buffer = device.buffer(1024).unwrap();
    let mut pass = impatient.pass().unwrap();
    pass.write(buffer.whole(), &[8_u32; 256]).unwrap();
    // What was never handed over is not waited for.
    drop(pass);
    let mut pass = impatient.pass().unwrap();
    pass.write(buffer.whole(), &[8_u32; 256]).unwrap();
    pass.go_on().unwrap();
    drop(pass);
    assert_given_up(&device);
}

#[test]
fn a_clock_that_takes_too_long_is_read_no_more() {
    let (device, impatient) = devices();
    assert_hung(impatient.start_timeline());
    assert_given_up(&device);
}

#[test]
fn copies_that_take_too_long_are_the_last() {
    let (device, impatient) = devices();
    let buffer = device.upload_buffer(1024).unwrap();
    let mut uploads = impatient.uploads().unwrap();
    let mut uploading = uploads.begin();
    uploading.write_all(buffer.whole(), &[8_u32; 256]).unwrap();
    assert_hung(uploading.wait());
    assert_hung(uploading.wait());
    drop(uploading);
    assert_given_up(&device);
}
