# mkRunner { sm }: the image that serves engines on one GPU architecture of archs.nix.
{ ngcImage }:
{ sm }:
ngcImage {
  name = "cog-triton-runner-${sm}";
  kind = "runner";
  inherit sm;
}
