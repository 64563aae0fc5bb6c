// Many rows of x, on a GPU with units that multiply matrices of 16 x 16 (VK_KHR_cooperative_matrix), in subgroups of 32: a group computes
// ROW_TILE rows of x times MATRIX_TILE rows of the matrix. In steps of 32 columns both are put into shared memory as F16; each of
// its eight subgroups multiplies 32 x 64 of them, and sums in F32. What the next step takes is loaded before the units are used.

@group(0) @binding(1) var<storage, read> x: array<vec4f>;

const THREADS = 256u;
const MATRIX_TILE = 128u;
const ROW_TILE = 128u;
const STEP = 32u;
// Of a subgroup's part, in sixteens.
const MATRIX_PARTS = 4u;
const ROW_PARTS = 2u;
const PARTS = 8u;
// Vectors of four that a thread loads in a step, of x.
const QUADS = 4u;
// Vectors of four between the beginnings of rows in shared memory: no multiple of what its banks hold.
const PITCH = 10u;
const LARGEST_F16 = 65504.0;

var<workgroup> matrix_part: array<vec4<f16>, MATRIX_TILE * PITCH>;
var<workgroup> x_part: array<vec4<f16>, ROW_TILE * PITCH>;
var<workgroup> results: array<f32, 8 * 256>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3u,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let first_matrix_row = group.x * MATRIX_TILE;
    let first_row = group.y * ROW_TILE;
    // Where the subgroup's part begins.
    let left = subgroup % 2u * 16u * MATRIX_PARTS;
    let top = subgroup / 2u * 16u * ROW_PARTS;
    var sums: array<coop_mat16x16<f32, C>, PARTS>;
    for (var i = 0u; i < PARTS; i++) { // unrolled
        sums[i] = coop_mat16x16<f32, C>();
    }

    var weights_ahead = load_from(first_matrix_row + thread / 2u, unit_at(0u, thread));
    var x_ahead: array<vec4f, QUADS>;
    for (var i = 0u; i < QUADS; i++) { // unrolled
        x_ahead[i] = x[quad_at(0u, first_row, thread + i * THREADS)];
    }
    for (var column = 0u; column < params.cols; column += STEP) {
        let w = unpacked(weights_ahead);
        let at = thread / 2u * PITCH + thread % 2u * 4u;
        matrix_part[at] = vec4<f16>(w.a);
        matrix_part[at + 1u] = vec4<f16>(w.b);
        matrix_part[at + 2u] = vec4<f16>(w.c);
        matrix_part[at + 3u] = vec4<f16>(w.d);
        for (var i = 0u; i < QUADS; i++) { // unrolled
            // The last step may have only sixteen columns: behind them, zeros are multiplied.
            let own = thread + i * THREADS;
            let inside = column + own % 8u * 4u < params.cols;
            let four = select(vec4f(), clamp(x_ahead[i], vec4f(-LARGEST_F16), vec4f(LARGEST_F16)), inside);
            x_part[own / 8u * PITCH + own % 8u] = vec4<f16>(four);
        }
        workgroupBarrier();
        let next = column + STEP;
        if next < params.cols {
            weights_ahead = load_from(first_matrix_row + thread / 2u, unit_at(next, thread));
            for (var i = 0u; i < QUADS; i++) { // unrolled
                x_ahead[i] = x[quad_at(next, first_row, thread + i * THREADS)];
            }
        }
        for (var half = 0u; half < 2u; half++) { // unrolled
            var rows: array<coop_mat16x16<f16, A>, ROW_PARTS>;
            for (var r = 0u; r < ROW_PARTS; r++) { // unrolled
                rows[r] = coopLoadT<coop_mat16x16<f16, A>>(&x_part[(top + 16u * r) * PITCH + 4u * half], PITCH);
            }
            for (var m = 0u; m < MATRIX_PARTS; m++) { // unrolled
                let part = coopLoad<coop_mat16x16<f16, B>>(&matrix_part[(left + 16u * m) * PITCH + 4u * half], PITCH);
                for (var r = 0u; r < ROW_PARTS; r++) { // unrolled
                    sums[r * MATRIX_PARTS + m] = coopMultiplyAdd(rows[r], part, sums[r * MATRIX_PARTS + m]);
                }
            }
        }
        workgroupBarrier();
    }
    for (var r = 0u; r < ROW_PARTS; r++) { // unrolled
        for (var m = 0u; m < MATRIX_PARTS; m++) { // unrolled
            coopStoreT(sums[r * MATRIX_PARTS + m], &results[subgroup * 256u], 16u);
            workgroupBarrier();
            for (var i = lane; i < 256u; i += 32u) {
                let row = first_row + top + 16u * r + i / 16u;
                let matrix_row = first_matrix_row + left + 16u * m + i % 16u;
                if row < params.rows && matrix_row < params.matrix_rows {
                    finish(row, matrix_row, results[subgroup * 256u + i]);
                }
            }
            workgroupBarrier();
        }
    }
}

// Which sixteen weights of its row a thread loads, in the step from `column` on.
fn unit_at(column: u32, thread: u32) -> u32 {
    return min(column / 16u + thread % 2u, params.cols / 16u - 1u);
}

// Where the `own`th four numbers of x that a step takes lie.
fn quad_at(column: u32, first_row: u32, own: u32) -> u32 {
    let quads = params.cols / 4u;
    return min(first_row + own / 8u, params.rows - 1u) * quads + min(column / 4u + own % 8u, quads - 1u);
}
