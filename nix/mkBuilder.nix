# mkBuilder { sm ? null }: the image that builds engines, for every architecture or for one.
{ ngcImage }:
{
  sm ? null,
}:
ngcImage {
  name = "cog-triton-builder" + (if sm == null then "" else "-${sm}");
  kind = "builder";
  inherit sm;
}
