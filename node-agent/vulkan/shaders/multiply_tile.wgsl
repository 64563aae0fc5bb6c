// Many rows of x: a group of 256 threads computes 64 rows of x times 64 rows of the matrix, four by four a thread. In steps of 32 columns
// both are put into shared memory, 16 KiB in all, which every device has.

@group(0) @binding(1) var<storage, read> x: array<vec4f>;

const TILE = 64u;
const STEP = 32u;
// Columns of a turn of the loop that multiplies. Mesa's lavapipe ends a thread's loops after 65,535 turns of all of them: with a column a turn, rows
// of more than 56,677 columns would be cut, and with four it is those of more than 161,316.
const AT_ONCE = 4u;

// STEP x TILE, four neighbouring rows in a vector.
var<workgroup> matrix_part: array<array<vec4f, 16>, STEP>;
var<workgroup> x_part: array<array<vec4f, 16>, STEP>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
    if is_idle(group) {
        return;
    }
    let first_matrix_row = group.x * TILE;
    let first_row = first_row_of(group, TILE);
    let end = end_of_rows();
    let quads = params.cols / 4u;

    // What this thread puts into shared memory: of one row.
    let place = thread % TILE;
    let own_row = x_row(min(first_row + place, end - 1u));
    // What it computes.
    let left = thread % 16u;
    let top = thread / 16u;
    var sums: array<vec4f, 4>;

    for (var column = 0u; column < params.cols; column += STEP) {
        // Half of the threads unpack sixteen weights each; the last step may have only sixteen columns.
        if thread < 128u {
            let unit = column / 16u + thread / TILE;
            var w: Sixteen;
            if unit < params.cols / 16u {
                w = unpacked(load_from(first_matrix_row + place, unit));
            }
            let first = thread / TILE * 16u;
            put_matrix(first, place, w.a);
            put_matrix(first + 4u, place, w.b);
            put_matrix(first + 8u, place, w.c);
            put_matrix(first + 12u, place, w.d);
        }
        for (var quad = thread / TILE; quad < STEP / 4u; quad += 4u) {
            var four: vec4f;
            if column / 4u + quad < quads {
                four = x[own_row * quads + column / 4u + quad];
            }
            for (var i = 0u; i < 4u; i++) {
                x_part[4u * quad + i][place / 4u][place % 4u] = four[i];
            }
        }
        workgroupBarrier();
        for (var first = 0u; first < STEP; first += AT_ONCE) {
            for (var k = 0u; k < AT_ONCE; k++) { // unrolled
                let w = matrix_part[first + k][left];
                let rows = x_part[first + k][top];
                sums[0] += rows.x * w;
                sums[1] += rows.y * w;
                sums[2] += rows.z * w;
                sums[3] += rows.w * w;
            }
        }
        workgroupBarrier();
    }
    for (var r = 0u; r < 4u; r++) {
        let row = first_row + 4u * top + r;
        for (var c = 0u; c < 4u; c++) {
            let matrix_row = first_matrix_row + 4u * left + c;
            if row < end && matrix_row < params.matrix_rows {
                finish(row, matrix_row, sums[r][c]);
            }
        }
    }
}

fn put_matrix(first: u32, place: u32, four: vec4f) {
    for (var i = 0u; i < 4u; i++) {
        matrix_part[first + i][place / 4u][place % 4u] = four[i];
    }
}
